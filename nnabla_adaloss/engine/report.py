# SPDX-License-Identifier: Apache-2.0
"""What a backward pass has found."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import compress
from operator import attrgetter
from typing import AbstractSet, Dict, FrozenSet, Iterable, Mapping, Optional, Sequence, Set, Tuple

from ..core.components import Components
from ..core.memory import Measured
from ..core.schedule import ScaleSchedule
from ..graph.plan import GraphPlan
from ..graph.structure import GraphStructure
from .leaf_gradients import Contribution, ContributionAmax

_position = attrgetter("leaf")


@dataclass(frozen=True)
class PassReport:
    """What a backward pass has found: `result` of an `AdaptiveLossScaling`.

    Attributes:
        found_inf: functions, by name, whose gradients are not finite, first in backward order first.
        kind: `"hookless"`; `"measuring"`: every gradient was measured; or why there were hooks around single
            functions.
        state_finite: whether running statistics, and whatever else forward has written, are finite.

    Example:
        >>> import numpy as np, nnabla as nn, nnabla.functions as F, nnabla.parametric_functions as PF
        >>> from nnabla_adaloss import AdaptiveLossScaling
        >>> x = nn.Variable.from_numpy_array(np.ones((4, 3), np.float32))
        >>> scaling = AdaptiveLossScaling(F.mean(PF.affine(x, 2, name="a") ** 2))
        >>> scaling.forward(clear_no_need_grad=True)
        >>> scaling.backward(clear_buffer=True)
        >>> scaling.result
        PassReport(kind='measuring', found_inf=[], component=None, state_finite=True)
    """

    plan: GraphPlan
    schedule: ScaleSchedule
    scales: Mapping[int, float]
    leaves: Sequence[Contribution]  # those whose gradients were written
    largest: Sequence[float]  # of each, divided by its scale; infinity where it is not finite
    found_inf: Sequence[str] = ()
    amax: Mapping[int, float] = field(default_factory=dict)
    measured_all: bool = False
    overflowed: Optional[int] = None
    suspected: AbstractSet[int] = frozenset()
    kind: str = "hookless"
    state_finite: bool = True

    def __repr__(self) -> str:
        return (
            f"PassReport(kind={self.kind!r}, found_inf={list(self.found_inf)}, component={self.component!r}, "
            f"state_finite={self.state_finite})"
        )

    def measured(self, limits: Sequence[float]) -> Measured:
        """What of it is remembered; `limits`: the largest magnitudes of the components."""
        schedule = self.schedule
        return Measured(
            schedule.components,
            limits,
            schedule.component_scales,
            schedule.loss_weights,
            self.amax,
            self.measured_all,
            not self.found_inf,
            any(self.largest),
            self.overflowed,
            self.suspected,
        )

    @property
    def is_absent(self) -> bool:
        """Whether no part of the network has a loss weight in the batch."""
        single, weights = self.schedule.components.single, self.schedule.loss_weights
        return not any(weight for index, weight in enumerate(weights) if index not in single)

    @property
    def component(self) -> Optional[str]:
        """The first part of the network, in backward order, that was not finite, by the name of the function
        that its first gradient belongs to; None: all were.
        """
        return None if self.overflowed is None else self.schedule.components.names[self.overflowed]

    @property
    def nonzero(self) -> AbstractSet[int]:
        """Keys of the leaves whose gradients are not all zeros."""
        written = {*compress(map(_position, self.leaves), self.largest)}
        # Mostly those of all leaves.
        if len(written) == len(self.plan.leaves):
            return self.plan.leaves.keys()
        return {self.plan.keys[position] for position in written}

    @property
    def nonfinite(self) -> AbstractSet[int]:
        """Keys of the leaves whose gradients are not finite."""
        keys = self.plan.keys
        return {keys[one.leaf] for one, amax in zip(self.leaves, self.largest) if amax == math.inf}


def amax_of_components(
    structure: GraphStructure,
    components: Components,
    gradients: Iterable[Tuple[int, float]],
    leaves: Iterable[ContributionAmax],
) -> Dict[int, float]:
    """The largest finite magnitude of each component, unscaled; gradients go by position."""
    found: Dict[int, float] = {}
    for position, largest in gradients:
        index = components.of.get(position)
        if index is not None and largest > found.get(index, -1.0):
            found[index] = largest
    for contribution, largest in leaves:
        if largest < math.inf:
            index = component_of_leaf(structure, components, contribution.leaf, contribution.function)
            if largest > found.get(index, -1.0):
                found[index] = largest
    return found


def component_of_leaf(structure: GraphStructure, components: Components, leaf: int, function: int) -> int:
    """The component that the gradient of a leaf belongs to, which a function writes."""
    if leaf in components.of and any(s.target == leaf for s in structure.by_number[function].slots):
        return components.of[leaf]
    return components.producers[function]


def first_overflow(
    structure: GraphStructure,
    components: Components,
    bad: AbstractSet[int],
    bad_functions: Mapping[int, int],
    raised: AbstractSet[int] = frozenset(),
) -> Optional[int]:
    """The first component, in backward order, that was not finite; `bad_functions`: with that of their leaf;
    `raised`: what overflowed only on the way to the scale of the component behind.
    """
    for node in structure.nodes:
        if not bad.isdisjoint(node.outputs):
            if len(node.outputs) == 1 and node.separates and node.inputs and node.outputs[0] in raised:
                return components.of[node.inputs[0]]
            return components.producers[node.number]
        if node.number in bad_functions:
            return bad_functions[node.number]
    return None


def unseen_before(components: Components, overflowed: int, seen: AbstractSet[int]) -> FrozenSet[int]:
    """The components before an overflow that may have handed it on: nothing finite was seen of them."""
    # Scalars do not overflow before what follows them.
    found: Set[int] = set()
    waiting = [overflowed]
    while waiting:
        behind = waiting.pop()
        before = {index for index, following in enumerate(components.next) if behind in following}
        new = before - seen - found - components.single - {overflowed}
        found |= new
        waiting += new
    return frozenset(found)
