# SPDX-License-Identifier: Apache-2.0
"""The scales of one backward pass: chosen once, they can be applied to any graph of the same topology."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Dict, Iterator, Mapping, NamedTuple, Optional, Sequence, Tuple

from ..core.layer_record import LayerRecord
from ..core.reason import Reason
from ..graph.node import LayerSlot, NodeStructure
from ..graph.structure import GraphStructure


class Rescale(NamedTuple):
    """A gradient that is multiplied in place, between two functions.

    Attributes:
        position: of the variable whose gradient it is.
        factor: what it is multiplied by.
    """

    position: int
    factor: float


class Step(NamedTuple):
    """What is done around the backward of one function.

    Attributes:
        before: gradients that are brought to another scale before it runs.
        scale: what its contributions carry, except those that an alpha raises.
        alphas: of its layers, in the order of `NodeStructure.slots`.
        after: gradients that are brought to another scale when it has run.
    """

    before: Tuple[Rescale, ...]
    scale: float
    alphas: Tuple[float, ...]
    after: Tuple[Rescale, ...] = ()

    def targets(self, node: NodeStructure) -> Dict[int, float]:
        """The scales that the input gradients of the layers of `node` carry, by position."""
        return {slot.target: self.scale * alpha for slot, alpha in zip(node.slots, self.alphas)}


@dataclass(frozen=True)
class ScaleSchedule:
    """The scales of one pass; it can be replayed on any graph of the same topology. No graph is kept:
    functions go by number and variables by position.

    Attributes:
        structure: how the graph is built.
        fixed_scale: S0, where it was given; None: it was measured.
        start_scale: the loss scale to start with when nothing is known.
        seed: the scale of the loss gradient.
        loss_scale: loss scale after the scalar functions at the loss.
        steps: by number of the function; functions that only pass a scale on have none.
        scales: what each gradient carries in the end, by position.
        components: the scale of each component; None where there are none.
        matched: how many gradients are brought to the scale of a branch that they meet.
    """

    structure: GraphStructure
    fixed_scale: Optional[float]
    start_scale: float
    seed: float
    loss_scale: float
    steps: Mapping[int, Step]
    scales: Mapping[int, float]
    components: Optional[Sequence[Optional[float]]]
    matched: int

    def is_applied_as(self, other: ScaleSchedule) -> bool:
        """Whether a pass does the same with `other`, of a graph of the same topology."""
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
        """A record of each layer for a pass that reuses these scales, in backward order.

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
