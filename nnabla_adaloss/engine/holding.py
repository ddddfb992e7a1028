# SPDX-License-Identifier: Apache-2.0
"""How long the scales of one pass are held before they are measured again."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Mapping, Optional, Sequence

from ..core.config import AdaLossConfig
from ..core.methods import Fixed
from ..core.validation import integer, number
from ..graph.structure import GraphStructure
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
        # The iteration that measured last, and the one before it.
        self._measured_at = self._measured_before = -2

    @classmethod
    def configured(cls, config: AdaLossConfig, *, delayed: bool) -> Holding:
        """What `config` asks for, with no scales held.

        Args:
            config: how scales are computed, and how often they are measured.
            delayed: whether scales follow from the statistics of the iteration before.
        """
        method = config.method
        constant = isinstance(method, Fixed) and method.fixed_loss_scale == 1.0
        return cls(config.iterations_per_measurement, constant=constant, delayed=delayed)

    def wanted(self, iteration: int, given: Optional[float]) -> bool:
        """Whether the scales of a pass that chooses them in this iteration would be held."""
        if self._for(given) == math.inf:
            return True
        # Of statistics that are as old as the scales held before, none are made. Other batches of this
        # iteration may have measured already; what they have is for the next one.
        known = self._measured_before if self._measured_at == iteration else self._measured_at
        return self._iterations > 1 and (not self._delayed or known == iteration - 1)

    def scales(self, iteration: int, given: Optional[float]) -> Optional[HeldScales]:
        """The scales to be used in this iteration; None: they are to be chosen.

        Args:
            iteration: number of the iteration.
            given: S0; None: measured.
        """
        held, age, longest = self.held, iteration - self._since, self._for(given)
        if held is None or held.given != given:
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
        if iteration != self._measured_at:
            self._measured_before, self._measured_at = self._measured_at, iteration

    def keep(self, held: HeldScales, iteration: int) -> None:
        """Hold the scales that were chosen in this iteration."""
        self.held, self._since = held, iteration

    def drop(self) -> None:
        """Have scales chosen anew."""
        self.held = None

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

    def load_state_dict(
        self, structure: GraphStructure, state: Mapping[str, Any], *, components: int
    ) -> None:
        """Take over what `state_dict` returned for such a graph; nothing changes when it raises.

        Args:
            structure: how the graph is built.
            state: what `state_dict` returned.
            components: how many components the graph has.

        Raises:
            KeyError, TypeError, ValueError, IndexError: `state` is none that `state_dict` returned.
        """
        since, measured_at = integer("since", state["since"]), integer("measured_at", state["measured_at"])
        held = None if state["scales"] is None else _from_dict(structure, state["scales"])
        if held is not None and held.components is not None and len(held.components) != components:
            raise ValueError(f"{len(held.components)} components; the network has {components}")
        self._since, self._measured_at, self.held = since, measured_at, held
        self._measured_before = -2


def _as_dict(held: HeldScales) -> Dict[str, Any]:
    structure = held.structure
    functions = {node.number: index for index, node in enumerate(structure.nodes)}
    variables = {position: index for index, position in enumerate(_positions(structure))}

    def brought(many: Sequence[Brought]) -> List[Any]:
        return [[variables[one.position], one.factor] for one in many]

    return {
        "given": held.given,
        "start_scale": held.start_scale,
        "seed": held.seed,
        "loss_scale": held.loss_scale,
        "steps": [
            [functions[number], brought(step.before), step.scale, list(step.alphas), brought(step.after)]
            for number, step in held.steps.items()
        ],
        "scales": [[variables[position], scale] for position, scale in held.scales.items()],
        "matched": held.matched,
        "components": None if held.components is None else list(held.components),
    }


def _from_dict(structure: GraphStructure, state: Mapping[str, Any]) -> HeldScales:
    nodes, positions = structure.nodes, _positions(structure)

    def brought(many: Sequence[Sequence[Any]]) -> Any:
        return tuple(Brought(positions[index], number("factor", factor)) for index, factor in many)

    steps = {
        nodes[index].number: Step(
            brought(before), number("scale", scale), tuple(number("alpha", a) for a in alphas), brought(after)
        )
        for index, before, scale, alphas, after in state["steps"]
    }
    components = state["components"]
    if components is not None:
        components = [c if c is None else number("scale", c) for c in components]
    return HeldScales(
        structure,
        state["given"] if state["given"] is None else number("given", state["given"]),
        number("start_scale", state["start_scale"]),
        number("seed", state["seed"]),
        number("loss_scale", state["loss_scale"]),
        steps,
        {positions[index]: number("scale", scale) for index, scale in state["scales"]},
        components,
        integer("matched", state["matched"]),
    )


def _positions(structure: GraphStructure) -> List[int]:
    """Positions of the variables that scales are of, in the order in which states number them."""
    return [*structure.gradients, *structure.leaves]
