# SPDX-License-Identifier: Apache-2.0
"""The scales of one backward pass: chosen once, they can be applied to any graph of the same topology."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ..core.config import AdaLossConfig
from ..core.layer_record import LayerRecord, Reason
from ..core.methods import Fixed
from ..core.validation import integer, number
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

    def is_for(self, structure: GraphStructure, fixed_scale: Optional[float]) -> bool:
        """Whether it was chosen for graphs of this structure, and for this S0."""
        return self.structure is structure and self.fixed_scale == fixed_scale

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

    @cached_property
    def raised(self) -> List[Tuple[NodeStructure, LayerSlot, float]]:
        """The layers whose alpha is above 1, with their function and the alpha."""
        return [
            (node, slot, alpha)
            for node in self.structure.nodes
            if node.number in self.steps
            for slot, alpha in zip(node.slots, self.steps[node.number].alphas)
            if alpha > 1.0
        ]

    def _scaled(self, structure: GraphStructure) -> Iterator[Tuple[Step, LayerSlot, float]]:
        slots = {node.number: node.slots for node in structure.nodes}
        for index, step in self.steps.items():
            for slot, alpha in zip(slots[index], step.alphas):
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


class ScheduleCache:
    """The schedule in use, how long it is reused, and what is measured meanwhile for the next one.

    With `delay=1` a schedule is chosen before its first pass, and each of its iterations measures another
    share of the arrays: when the next one is chosen, all have been measured once. With `delay=0` the pass
    that chooses measures all of them, and its schedule serves the iterations after it.

    Args:
        iterations: how many iterations one choice serves.
        constant: whether layers have one scale for good, so that where S0 is given nothing is measured.
        delayed: whether scales follow from the statistics of earlier iterations (`delay=1`).

    Attributes:
        schedule: the schedule; None: it is to be chosen.
    """

    undone = "schedule", "_since"

    def __init__(self, iterations: int, *, constant: bool, delayed: bool) -> None:
        self.iterations = iterations
        self._constant = constant
        self._delayed = delayed
        self.schedule: Optional[ScaleSchedule] = None
        self._since = 0

    @classmethod
    def configured(cls, config: AdaLossConfig, *, delayed: bool) -> ScheduleCache:
        """An empty cache as `config` asks for.

        Args:
            config: how scales are computed, and how often they are measured.
            delayed: whether scales follow from the statistics of earlier iterations.
        """
        method = config.method
        constant = isinstance(method, Fixed) and method.fixed_loss_scale == 1.0
        return cls(config.iterations_per_measurement, constant=constant, delayed=delayed)

    def wanted(self, fixed_scale: Optional[float]) -> bool:
        """Whether the schedule of a pass that chooses as it runs would be reused."""
        return self._lifetime(fixed_scale) == math.inf or (self.iterations > 1 and not self._delayed)

    def current(self, iteration: int, fixed_scale: Optional[float]) -> Optional[ScaleSchedule]:
        """The schedule for this iteration; None: it is to be chosen.

        Args:
            iteration: number of the iteration.
            fixed_scale: S0; None: measured.
        """
        schedule, age, lifetime = self.schedule, iteration - self._since, self._lifetime(fixed_scale)
        if schedule is None or schedule.fixed_scale != fixed_scale:
            return None
        # With delay=0 all batches of the iteration that measures do.
        return schedule if lifetime == math.inf or int(not self._delayed) <= age < lifetime else None

    def share(self, iteration: int) -> Optional[int]:
        """Which share of the arrays an iteration measures, of `iterations`; None: nothing."""
        schedule = self.schedule
        if not self._delayed or schedule is None or self._lifetime(schedule.fixed_scale) == math.inf:
            return None
        # Each cycle begins with another share, so that of batches that take turns all are measured in time.
        return (iteration - self._since - self._since // self.iterations) % self.iterations

    def keep(self, schedule: ScaleSchedule, iteration: int) -> None:
        """Use the schedule that was chosen in this iteration."""
        self.schedule, self._since = schedule, iteration

    def drop(self) -> None:
        """Have scales chosen again."""
        self.schedule = None

    def for_good(self, *, measured: bool) -> bool:
        """Whether a schedule is never chosen again by itself: neither layers nor S0 are measured."""
        return self._constant and not measured

    def _lifetime(self, fixed_scale: Optional[float]) -> float:
        # As `for_good`, which is asked each time.
        return math.inf if self._constant and fixed_scale is not None else self.iterations

    def state_dict(self) -> Dict[str, Any]:
        """The schedule and its age, as plain numbers and lists."""
        schedule = None if self.schedule is None else _as_dict(self.schedule)
        return {"since": self._since, "schedule": schedule}

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
        since = integer("since", state["since"])
        schedule = None if state["schedule"] is None else _from_dict(structure, state["schedule"])
        of_schedule = None if schedule is None else schedule.components
        if of_schedule is not None and len(of_schedule) != components:
            raise ValueError(f"{len(of_schedule)} components; the network has {components}")
        self._since, self.schedule = since, schedule


def _as_dict(schedule: ScaleSchedule) -> Dict[str, Any]:
    structure = schedule.structure
    functions = {node.number: index for index, node in enumerate(structure.nodes)}
    variables = {position: index for index, position in enumerate(_positions(structure))}

    def rescales(many: Sequence[Rescale]) -> List[Any]:
        return [[variables[one.position], one.factor] for one in many]

    return {
        "fixed_scale": schedule.fixed_scale,
        "start_scale": schedule.start_scale,
        "seed": schedule.seed,
        "loss_scale": schedule.loss_scale,
        "steps": [
            [functions[number], rescales(step.before), step.scale, list(step.alphas), rescales(step.after)]
            for number, step in schedule.steps.items()
        ],
        "scales": [[variables[position], scale] for position, scale in schedule.scales.items()],
        "matched": schedule.matched,
        "components": None if schedule.components is None else list(schedule.components),
    }


def _from_dict(structure: GraphStructure, state: Mapping[str, Any]) -> ScaleSchedule:
    nodes, positions = structure.nodes, _positions(structure)

    def rescales(many: Sequence[Sequence[Any]]) -> Any:
        return tuple(Rescale(positions[index], number("factor", factor)) for index, factor in many)

    steps = {
        nodes[index].number: Step(
            rescales(before),
            number("scale", scale),
            tuple(number("alpha", a) for a in alphas),
            rescales(after),
        )
        for index, before, scale, alphas, after in state["steps"]
    }
    components = state["components"]
    if components is not None:
        components = [c if c is None else number("scale", c) for c in components]
    return ScaleSchedule(
        structure,
        state["fixed_scale"] if state["fixed_scale"] is None else number("fixed_scale", state["fixed_scale"]),
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
