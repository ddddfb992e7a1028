# SPDX-License-Identifier: Apache-2.0
"""The scales of one backward pass: one per component. All else is the ratio of neighbours."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Dict, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from ..core.layer_record import Reason
from ..core.validation import integer, number
from ..graph.components import Components
from ..graph.node import NodeStructure
from ..graph.structure import GraphStructure


class Rescale(NamedTuple):
    """A gradient that is multiplied in place, between two functions."""

    position: int
    factor: float


class Step(NamedTuple):
    """What is done around the backward of one function."""

    before: Tuple[Rescale, ...]  # before it runs
    scale: float  # what its contributions carry, except those that an alpha raises
    alphas: Tuple[float, ...]  # of its layers, in the order of `NodeStructure.slots`
    after: Tuple[Rescale, ...] = ()  # when it has run

    def targets(self, node: NodeStructure) -> Dict[int, float]:
        """The scales that the input gradients of the layers of `node` carry, by position."""
        return {slot.target: self.scale * alpha for slot, alpha in zip(node.slots, self.alphas)}


@dataclass(frozen=True)
class ScaleSchedule:
    """The scales of one pass, for any graph of the same topology: functions go by number, variables by
    position.
    """

    structure: GraphStructure
    graph: Components
    components: Sequence[float]  # the scale of each
    fixed_scale: Optional[float]  # S0, where it was given; None: it was measured
    reasons: Mapping[str, Reason] = field(default_factory=dict)  # by layer: what held its alpha where it is
    wishes: Mapping[str, float] = field(default_factory=dict)  # by layer: what the method said

    @property
    def seed(self) -> float:
        """The scale of the loss gradient."""
        return self.components[self.graph.root]

    @cached_property
    def loss_scale(self) -> float:
        """S0; where it is measured, the scale behind the functions of one element at the loss."""
        if self.fixed_scale is None:
            for edge in self.graph.edges:
                if edge.layer is None and edge.expands and edge.before in self.graph.governed:
                    return self.components[edge.after]
        return self.seed

    def is_applied_as(self, other: ScaleSchedule) -> bool:
        """Whether a pass does the same with another schedule of a graph of the same topology."""
        given = self.fixed_scale is None, other.fixed_scale is None
        return self.components == other.components and given[0] == given[1]

    @cached_property
    def _steps(self) -> Tuple[Dict[int, Step], Dict[int, float]]:
        return _steps_of(self.structure, self.graph, self.components, fixed=self.fixed_scale is not None)

    @property
    def steps(self) -> Mapping[int, Step]:
        """By number of the function; functions that only pass a scale on have none."""
        return self._steps[0]

    @property
    def scales(self) -> Mapping[int, float]:
        """What each gradient carries in the end, by position."""
        return self._steps[1]

    @cached_property
    def layers(self) -> Dict[str, Tuple[float, float]]:
        """Of each layer, in backward order, the scale of its output gradient and its alpha."""
        return {
            slot.layer: (step.scale, alpha)
            for node in self.structure.nodes
            for step in [self.steps.get(node.number)]
            if step is not None
            for slot, alpha in zip(node.slots, step.alphas)
        }


def _steps_of(
    structure: GraphStructure, graph: Components, components: Sequence[float], *, fixed: bool
) -> Tuple[Dict[int, Step], Dict[int, float]]:
    of = graph.of
    scales = {position: components[index] for position, index in of.items()}
    steps: Dict[int, Step] = {}
    reached: Set[int] = set()
    for node in structure.nodes:
        if node.separates:
            lifted = fixed and graph.governed.issuperset(of[p] for p in node.inputs)
            step = _boundary(node, scales, reached, lifted=lifted)
            if node.leaves or node.slots or step.before or step.after:
                steps[node.number] = step
            # A leaf's gradient is kept in an array of its own, which nothing brings to another scale.
            alone = [slot.target for slot in node.slots if slot.to_leaf]
            scales.update(dict.fromkeys((*node.outputs, *alone), step.scale))
        elif node.leaves or node.slots:
            scale = scales[node.outputs[0]]
            alphas = tuple([scales.get(slot.target, scale) / scale for slot in node.slots])
            steps[node.number] = Step((), scale, alphas)
        reached.update(node.inputs)
    return steps, scales


def _boundary(node: NodeStructure, scales: Mapping[int, float], reached: Set[int], *, lifted: bool) -> Step:
    """Around a function that changes the scale, though it is no layer: as much as the array of one element
    holds is multiplied before it runs, the rest after it. One that is not linear sees gradients without a
    scale.
    """
    own, behind = scales[node.outputs[0]], [scales[p] for p in node.inputs]
    if node.non_homogeneous:
        through = 1.0
    elif not behind:
        through = own
    else:
        # The lift of a given S0 is such that the array holds it.
        through = behind[0] if lifted else min(behind[0], own)
    # What other branches have brought to its inputs carries their scale already.
    arrived = [(p, scale) for p, scale in zip(node.inputs, behind) if p in reached]
    outputs = [(p, scales[p]) for p in node.outputs]
    before = [Rescale(p, through / scale) for p, scale in (*outputs, *arrived) if scale != through]
    after = [Rescale(p, scale / through) for p, scale in zip(node.inputs, behind) if scale != through]
    return Step(tuple(before), through, (1.0,) * len(node.slots), tuple(after))


class ScheduleCache:
    """The schedule in use, how long it is reused, and what is measured meanwhile for the next one.

    With `delay=1` each of its iterations measures another share of the arrays: when the next one is chosen,
    all have been measured once. With `delay=0` the iteration that chooses measures all of them.
    """

    undone = "schedule", "_since"

    def __init__(self, iterations: int, *, constant: bool, delayed: bool) -> None:
        self.iterations = iterations
        # Whether layers have one scale for good, so that where S0 is given nothing is measured.
        self._constant = constant
        self._delayed = delayed
        self.schedule: Optional[ScaleSchedule] = None
        self._since = 0

    def current(self, iteration: int, fixed_scale: Optional[float]) -> Optional[ScaleSchedule]:
        """The schedule for this iteration; None: it is to be chosen."""
        schedule, age = self.schedule, iteration - self._since
        if schedule is None or schedule.fixed_scale != fixed_scale:
            return None
        # With delay=0 all batches of the iteration that measures do.
        held = int(not self._delayed) <= age < self.iterations
        return schedule if held or self.for_good(fixed_scale) else None

    def share(self, iteration: int) -> Optional[int]:
        """Which share of the arrays an iteration measures, of `iterations`; None: nothing."""
        schedule = self.schedule
        if not self._delayed or schedule is None or (self._constant and schedule.fixed_scale is not None):
            return None
        # Each cycle begins with another share, so that of batches that take turns all are measured in time.
        return (iteration - self._since - self._since // self.iterations) % self.iterations

    def keep(self, schedule: ScaleSchedule, iteration: int) -> None:
        """Use the schedule that was chosen in this iteration."""
        self.schedule, self._since = schedule, iteration

    def drop(self) -> None:
        """Have scales chosen again."""
        self.schedule = None

    def for_good(self, fixed_scale: Optional[float]) -> bool:
        """Whether nothing is measured: neither layers nor S0."""
        return self._constant and fixed_scale is not None

    def state_dict(self) -> Dict[str, Any]:
        """The schedule and its age, as plain numbers and lists."""
        schedule = self.schedule
        return {
            "since": self._since,
            "scales": schedule and list(schedule.components),
            "fixed_scale": schedule and schedule.fixed_scale,
        }

    def load_state_dict(
        self, structure: GraphStructure, components: Components, state: Mapping[str, Any]
    ) -> None:
        """Take over what `state_dict` returned for such a graph; nothing changes when it raises KeyError,
        TypeError or ValueError.
        """
        since, scales, fixed = integer("since", state["since"]), state["scales"], state["fixed_scale"]
        schedule: Optional[ScaleSchedule] = None
        if scales is not None:
            checked = [_scale(scale) for scale in scales]
            if len(checked) != len(components.names):
                raise ValueError(f"{len(checked)} components; the network has {len(components.names)}")
            fixed = None if fixed is None else _scale(fixed)
            schedule = ScaleSchedule(structure, components, checked, fixed)
        self._since, self.schedule = since, schedule


def _scale(value: Any) -> float:
    scale = number("scale", value)
    if not 0.0 < scale < math.inf:
        raise ValueError(f"scale={scale!r} must be positive and finite")
    return scale
