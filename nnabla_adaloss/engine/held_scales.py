# SPDX-License-Identifier: Apache-2.0
"""What one backward pass did with its scales, so that later ones can do it again without measuring."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ..core.layer_record import LayerRecord
from ..core.reason import Reason
from ..graph.node import LayerSlot, Node
from ..graph.plan import GraphPlan
from ..graph.structure import GraphStructure


class Brought(NamedTuple):
    """A gradient that was multiplied in place, between two functions.

    Attributes:
        position: of the variable whose gradient it is.
        factor: what it was multiplied by.
    """

    position: int
    factor: float


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


@dataclass(frozen=True)
class HeldScales:
    """All that was done in a pass; a graph that is wired alike, with the same start, can be gone through so
    again. No graph is kept: functions go by number and variables by position.

    Attributes:
        structure: how the graph is built.
        given: S0, where it was given; None: it was measured.
        start_scale: what the loss gradient starts with when nothing is known.
        seed: what it did start with.
        loss_scale: what it left the functions of one element at the loss with.
        steps: by number of the function; functions that only pass a scale on have none.
        scales: what each gradient carried in the end, by position.
        components: the scale of each component; None where there are none.
        matched: how many gradients were brought to the scale of a branch that they meet.
    """

    structure: GraphStructure
    given: Optional[float]
    start_scale: float
    seed: float
    loss_scale: float
    steps: Mapping[int, Step]
    scales: Mapping[int, float]
    components: Optional[Sequence[Optional[float]]]
    matched: int

    def is_applied_as(self, other: HeldScales) -> bool:
        """Whether the steps of a pass are the same as with `other`, of a graph that is wired alike."""
        return self.seed == other.seed and self.steps == other.steps and self.scales == other.scales

    @cached_property
    def layer_scales(self) -> Dict[str, float]:
        """Alpha by layer."""
        return {slot.layer: alpha for _, slot, alpha in self._scaled(self.structure)}

    @cached_property
    def accumulated_scales(self) -> Dict[str, float]:
        """The scale S on each layer's input gradient, by layer."""
        return {slot.layer: step.scale * alpha for step, slot, alpha in self._scaled(self.structure)}

    def _scaled(self, structure: GraphStructure) -> Iterator[Tuple[Step, LayerSlot, float]]:
        slots = {node.number: node.slots for node in structure.nodes}
        for number, step in self.steps.items():
            for slot, alpha in zip(slots[number], step.alphas):
                yield step, slot, alpha

    def records(self, structure: GraphStructure, iteration: int, attempt: int) -> Iterator[LayerRecord]:
        """What there is to report of each layer in a pass with these scales, in backward order.

        Args:
            structure: that of the graph, which may have other shapes.
            iteration: number of the iteration.
            attempt: number of the pass within it.
        """
        for step, slot, alpha in self._scaled(structure):
            yield LayerRecord(
                iteration,
                slot.layer,
                alpha,
                alpha,
                step.scale,
                step.scale * alpha,
                slot.slot.fan_in,
                None,
                None,
                Reason.HELD,
                attempt,
            )


class StepRecorder:
    """Takes down the steps of a pass.

    Args:
        plan: the graph.

    Attributes:
        steps: those of the functions that have run, by number.
    """

    def __init__(self, plan: GraphPlan) -> None:
        self.steps: Dict[int, Step] = {}
        self._positions = plan.positions
        self._node: Optional[Node] = None
        self._brought: List[Brought] = []
        self._step: Optional[Step] = None

    def begin(self, node: Node) -> None:
        """The function `node` is next."""
        self._node, self._step = node, None
        self._brought.clear()

    def bring(self, key: int, factor: float) -> None:
        """The gradient of the variable `key` is multiplied."""
        self._brought.append(Brought(self._positions[key], factor))

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
                self.steps[node.number] = step
        self._node = None
