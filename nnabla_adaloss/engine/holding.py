# SPDX-License-Identifier: Apache-2.0
"""How long the scales of one pass are held before they are measured again."""

from __future__ import annotations

import math
from copy import copy
from typing import Any, Dict, List, Mapping, Optional, Sequence

from ..core.validation import integer, number
from ..graph.plan import GraphPlan
from ..graph.renaming import Renaming
from .component_scales import ComponentPass
from .held_scales import Brought, HeldScales, Step


class Holding:
    """The scales that are held, and since when.

    Args:
        iterations: how many iterations a pass that measures serves, its own included.
        constant: whether layers have one scale for good, so that where S0 is given nothing is measured.
        delayed: whether scales follow from the statistics of the iteration before, which then has to measure
            as well.

    Attributes:
        held: the scales; None: they are to be chosen.
    """

    def __init__(self, iterations: int, *, constant: bool, delayed: bool) -> None:
        self._iterations = iterations
        self._constant = constant
        self._delayed = delayed
        self.held: Optional[HeldScales] = None
        self._since = 0
        self._measured_at = -2

    def wanted(self, iteration: int, given: Optional[float]) -> bool:
        """Whether the scales of a pass that chooses them in this iteration would be held."""
        if self._for(given) == math.inf:
            return True
        # Of statistics that are as old as the scales held before, none are made.
        return self._iterations > 1 and (not self._delayed or self._measured_at == iteration - 1)

    def scales(self, plan: GraphPlan, iteration: int, given: Optional[float]) -> Optional[HeldScales]:
        """The scales to be used in this iteration; None: they are to be chosen.

        Args:
            plan: the graph as it is now.
            iteration: number of the iteration.
            given: S0; None: measured.
        """
        held, age, longest = self.held, iteration - self._since, self._for(given)
        if held is None or held.plan is not plan or held.given != given:
            return None
        # All batches of the iteration that measures do.
        return held if longest == math.inf or 0 < age < longest else None

    def measures(self, iteration: int) -> bool:
        """Whether a pass with held scales is to take statistics, from which the next ones are chosen."""
        held = self.held
        last = self._since + self._iterations - 1
        return self._delayed and iteration == last and held is not None and self._for(held.given) < math.inf

    def looks(self, iteration: int) -> bool:
        """Whether a pass of this iteration will take statistics, as far as it is known before."""
        held = self.held
        if held is None or self.measures(iteration):
            return True
        return iteration - self._since >= self._for(held.given)

    def measured(self, iteration: int) -> None:
        """A pass of this iteration has measured."""
        self._measured_at = iteration

    def keep(self, held: HeldScales, iteration: int) -> None:
        """Hold the scales that were chosen in this iteration."""
        self.held, self._since = held, iteration

    def drop(self) -> None:
        """Have scales chosen anew."""
        self.held = None

    def renamed(self, names: Renaming, *, by_layer: bool) -> Holding:
        """The same for another graph that was built alike.

        Args:
            names: what is where in it.
            by_layer: whether layers separate components.
        """
        again = copy(self)
        if self.held is not None:
            again.held = self.held.renamed(names, by_layer=by_layer)
        return again

    def for_good(self, *, measured: bool) -> bool:
        """Whether scales are held until they are told to change: where neither layers nor S0 are measured."""
        return self._constant and not measured

    def _for(self, given: Optional[float]) -> float:
        # As `for_good`, which is asked each time.
        return math.inf if self._constant and given is not None else self._iterations

    def state_dict(self) -> Dict[str, Any]:
        """What is held, as plain numbers and lists."""
        held = None if self.held is None else _as_dict(self.held)
        return {"since": self._since, "measured_at": self._measured_at, "scales": held}

    def load_state_dict(self, plan: GraphPlan, by_layer: bool, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned for such a graph; nothing changes when it raises.

        Raises:
            KeyError, TypeError, ValueError, IndexError: `state` is none that `state_dict` returned.
        """
        since, measured_at = integer("since", state["since"]), integer("measured_at", state["measured_at"])
        held = None if state["scales"] is None else _from_dict(plan, by_layer, state["scales"])
        self._since, self._measured_at, self.held = since, measured_at, held


def _as_dict(held: HeldScales) -> Dict[str, Any]:
    functions = {key: index for index, key in enumerate(held.plan.nodes)}
    variables = {key: index for index, key in enumerate(_keys(held.plan))}

    def brought(many: Sequence[Brought]) -> List[Any]:
        return [[variables[one.key], one.factor] for one in many]

    return {
        "given": held.given,
        "start_scale": held.start_scale,
        "seed": held.seed,
        "loss_scale": held.loss_scale,
        "steps": [
            [functions[key], brought(step.before), step.scale, list(step.alphas), brought(step.after)]
            for key, step in held.steps.items()
        ],
        "scales": [[variables[key], scale] for key, scale in held.scales.items()],
        "matched": held.matched,
        "components": None if held.components is None else list(held.components.scales),
    }


def _from_dict(plan: GraphPlan, by_layer: bool, state: Mapping[str, Any]) -> HeldScales:
    nodes, keys = list(plan.nodes.values()), _keys(plan)
    by_key = dict(zip(plan.variable_keys, plan.variables))

    def brought(many: Sequence[Sequence[Any]]) -> Any:
        return tuple(Brought(by_key[keys[i]], keys[i], number("factor", factor)) for i, factor in many)

    steps = {
        nodes[index].function_key: Step(
            brought(before), number("scale", scale), tuple(number("alpha", a) for a in alphas), brought(after)
        )
        for index, before, scale, alphas, after in state["steps"]
    }
    components = state["components"]
    if components is not None:
        found = plan.components(by_layer=by_layer)
        if len(components) != len(found.names):
            raise ValueError(f"{len(components)} components; the network has {len(found.names)}")
        components = ComponentPass(found, [c if c is None else number("scale", c) for c in components])
    return HeldScales(
        plan,
        state["given"] if state["given"] is None else number("given", state["given"]),
        number("start_scale", state["start_scale"]),
        number("seed", state["seed"]),
        number("loss_scale", state["loss_scale"]),
        steps,
        {keys[index]: number("scale", scale) for index, scale in state["scales"]},
        components,
        integer("matched", state["matched"]),
    )


def _keys(plan: GraphPlan) -> List[int]:
    return [*plan.variable_keys, *plan.leaves]
