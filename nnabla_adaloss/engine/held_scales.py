# SPDX-License-Identifier: Apache-2.0
"""What one backward pass did with its scales, so that later ones can do it again without measuring."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple

import nnabla as nn

from ..core.layer_record import LayerRecord
from ..core.reason import Reason
from ..graph.node import Node, Scaling
from ..graph.plan import GraphPlan
from ..graph.renaming import Renaming
from .component_scales import ComponentPass


class Brought(NamedTuple):
    """A gradient that was multiplied in place, between two functions.

    Attributes:
        variable: whose gradient.
        key: its key.
        factor: what it was multiplied by.
    """

    variable: nn.Variable
    key: int
    factor: float

    def renamed(self, names: Renaming) -> Brought:
        """The same in another graph that was built alike."""
        key = names.variables[self.key]
        return Brought(names.by_key[key], key, self.factor)


class Step(NamedTuple):
    """What was done around the backward of one function.

    Attributes:
        before: gradients that were brought to another scale before it ran.
        scale: what its contributions carry, but those that an alpha has raised.
        alphas: of its layers, in the order of `Node.scalings`.
        after: gradients that were brought to another scale when it had run.
    """

    before: Tuple[Brought, ...]
    scale: float
    alphas: Tuple[float, ...]
    after: Tuple[Brought, ...] = ()

    def targets(self, node: Node) -> Dict[int, float]:
        """The scales that the input gradients of the layers of `node` carry, by variable key."""
        return {s.target_key: self.scale * alpha for s, alpha in zip(node.scalings, self.alphas)}

    def renamed(self, names: Renaming) -> Step:
        """The same in another graph that was built alike."""
        if not self.before and not self.after:
            return self
        before, after = (tuple(one.renamed(names) for one in many) for many in (self.before, self.after))
        return self._replace(before=before, after=after)


@dataclass(frozen=True)
class HeldScales:
    """All that was done in a pass; the same graph with the same start can be gone through so again.

    Attributes:
        plan: the graph.
        given: S0, where it was given; None: it was measured.
        start_scale: what the loss gradient starts with when nothing is known.
        seed: what it did start with.
        loss_scale: what it left the functions of one element at the loss with.
        steps: by function key; functions that only pass a scale on have none.
        scales: what each gradient carried in the end, by variable key.
        components: what was measured, with the scale of each component; None where there are none.
        matched: how many gradients were brought to the scale of a branch that they meet.
    """

    plan: GraphPlan
    given: Optional[float]
    start_scale: float
    seed: float
    loss_scale: float
    steps: Mapping[int, Step]
    scales: Mapping[int, float]
    components: Optional[ComponentPass]
    matched: int

    def renamed(self, names: Renaming, *, by_layer: bool) -> HeldScales:
        """The same for another graph that was built alike.

        Args:
            names: what is where in it.
            by_layer: whether layers separate components.
        """
        components = self.components
        if components is not None:
            components = ComponentPass(names.plan.components(by_layer=by_layer), components.scales)
        functions, variables = names.functions, names.variables
        return replace(
            self,
            plan=names.plan,
            steps={functions[key]: step.renamed(names) for key, step in self.steps.items()},
            scales={variables[key]: scale for key, scale in self.scales.items()},
            components=components,
        )

    def is_applied_as(self, other: HeldScales) -> bool:
        """Whether the steps of a pass are the same as with `other`."""
        return (
            self.plan is other.plan
            and self.seed == other.seed
            and self.steps == other.steps
            and self.scales == other.scales
        )

    @cached_property
    def layer_scales(self) -> Dict[str, float]:
        """Alpha by layer."""
        return {s.layer: alpha for _, s, alpha in self._scaled()}

    @cached_property
    def accumulated_scales(self) -> Dict[str, float]:
        """The scale S on each layer's input gradient, by layer."""
        return {s.layer: step.scale * alpha for step, s, alpha in self._scaled()}

    def _scaled(self) -> Iterator[Tuple[Step, Scaling, float]]:
        for key, step in self.steps.items():
            for scaling, alpha in zip(self.plan.nodes[key].scalings, step.alphas):
                yield step, scaling, alpha

    def records(self, iteration: int, attempt: int) -> Iterator[LayerRecord]:
        """What there is to report of each layer in a pass with these scales, in backward order."""
        for step, scaling, alpha in self._scaled():
            yield LayerRecord(
                iteration,
                scaling.layer,
                alpha,
                alpha,
                step.scale,
                step.scale * alpha,
                scaling.slot.fan_in,
                None,
                None,
                Reason.HELD,
                attempt,
            )


class StepRecorder:
    """Takes down the steps of a pass.

    Attributes:
        steps: those of the functions that have run.
    """

    def __init__(self) -> None:
        self.steps: Dict[int, Step] = {}
        self._node: Optional[Node] = None
        self._brought: List[Brought] = []
        self._step: Optional[Step] = None

    def begin(self, node: Node) -> None:
        """The function `node` is next."""
        self._node, self._step = node, None
        self._brought.clear()

    def bring(self, variable: nn.Variable, key: int, factor: float) -> None:
        """A gradient is multiplied."""
        self._brought.append(Brought(variable, key, factor))

    def run(self, scale: float, alphas: Tuple[float, ...]) -> None:
        """The function runs with these scales."""
        self._step = Step(tuple(self._brought), scale, alphas)
        self._brought.clear()

    def end(self) -> None:
        """What is to be done after the function is done."""
        node, step = self._node, self._step
        if node is not None and step is not None:
            if self._brought:
                step = step._replace(after=tuple(self._brought))
            if step.before or step.alphas or step.after or node.leaves:
                self.steps[node.function_key] = step
        self._node = None
