# SPDX-License-Identifier: Apache-2.0
"""What a pass without hooks does, planned once for a schedule; and whether a graph allows it."""

from __future__ import annotations

from operator import attrgetter
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import nnabla as nn

from ..core.power_of_two import is_power_of_two
from ..core.schedule import Rescale, ScaleSchedule, Step
from ..graph.node import Node, Scaling
from ..graph.plan import GraphPlan
from ..graph.structure import GraphStructure
from ..kernels.interface import GradientsInPlace
from .leaf_gradients import Contribution, contributions_of
from .scaled_weights import SwappedFactors

_zeroing, _size = attrgetter("zeroing"), attrgetter("size")


class HooklessLeaves:
    """Leaves that are taken for a whole pass; what is known of them is kept from pass to pass."""

    def __init__(
        self, leaves: Sequence[Contribution], following: Mapping[int, Sequence[Contribution]]
    ) -> None:
        self.leaves = leaves
        # Where contributions are unscaled one by one: by number of a function, the leaves that it has written
        # as the next one does.
        self.following = following
        # Whether nnabla writes to the masters themselves, where these are lazily zero.
        self.direct = not (following or any(leaf.half for leaf in leaves))
        self._gradients: Optional[GradientsInPlace] = None
        self._sizes: List[int] = []

    def written(self, masters: List[nn.NdArray]) -> Tuple[Sequence[Contribution], GradientsInPlace]:
        """What was written to `masters`, and is to be unscaled in place."""
        # An array that is still zeroing was not written.
        if any(map(_zeroing, masters)):
            kept = [(leaf, master) for leaf, master in zip(self.leaves, masters) if not master.zeroing]
            leaves = [leaf for leaf, _ in kept]
            return leaves, GradientsInPlace([master for _, master in kept], [one.scale for one in leaves])
        # Kernels trust the sizes, and `reset_shape` may have changed them.
        sizes = list(map(_size, masters))
        if self._gradients is None or self._sizes != sizes:
            self._sizes, self._gradients = sizes, GradientsInPlace(masters, [x.scale for x in self.leaves])
        self._gradients.arrays = masters
        return self.leaves, self._gradients


class HooklessSteps(NamedTuple):
    """What a pass without hooks does."""

    factors: SwappedFactors  # weights to be swapped
    leaves: HooklessLeaves  # leaves that get a gradient
    between: Mapping[int, Tuple[Rescale, ...]]  # rescales to run after a function, by its number

    def hold_for(self, structure: GraphStructure) -> bool:
        """Whether they hold for another graph of this structure: all weights are the same there."""
        return structure.kept_keys.issuperset(self.factors.keys)


def plan_steps(plan: GraphPlan, schedule: ScaleSchedule, *, rounded: bool) -> Union[HooklessSteps, str]:
    """The steps of a pass taken at once, or what stands in the way."""
    if plan.recomputes:
        return "activations are computed again in backward"
    steps = schedule.steps
    nodes = [(node, steps[node.number]) for node in plan.nodes.values() if node.number in steps]
    factors = _factors(nodes, plan.structure)
    if isinstance(factors, str):
        return factors
    leaves = _leaves(nodes, plan, rounded=rounded)
    return HooklessSteps(factors, leaves, _between(schedule))


_Nodes = Sequence[Tuple[Node, Step]]


def _factors(nodes: _Nodes, structure: GraphStructure) -> Union[SwappedFactors, str]:
    found: Dict[int, Tuple[Scaling, float]] = {}
    for node, step in nodes:
        for slot, scaling, alpha in zip(node.structure.slots, node.scalings, step.alphas):
            known = found.setdefault(slot.factor, (scaling, alpha))
            if known[1] != alpha:
                return f"{scaling.layer} shares a weight with a layer of another scale"
    swapped = {position: (scaling, alpha) for position, (scaling, alpha) in found.items() if alpha != 1.0}
    for position, (scaling, _) in swapped.items():
        if position not in structure.swappable:
            return f"others read what {scaling.layer} is multiplied by"
    return SwappedFactors(list(swapped.values()))


def _leaves(nodes: _Nodes, plan: GraphPlan, *, rounded: bool) -> HooklessLeaves:
    found: Dict[int, List[Contribution]] = {leaf: [] for leaf in plan.structure.leaves}
    for node, step in nodes:
        for leaf in contributions_of(plan.structure, node, step):
            found[leaf.leaf].append(leaf)
    following: Dict[int, List[Contribution]] = {}
    for writers in found.values():
        # nnabla adds up what is exact; what is rounded, or carries another scale, is no sum yet.
        exact = not (rounded or any(leaf.half for leaf in writers)) and is_power_of_two(writers[0].scale)
        if not (exact and {leaf.scale for leaf in writers} == {writers[0].scale}):
            for leaf, after in zip(writers, writers[1:]):
                following.setdefault(leaf.function, []).append(after)
    return HooklessLeaves([writers[0] for writers in found.values()], following)


def _between(schedule: ScaleSchedule) -> Dict[int, Tuple[Rescale, ...]]:
    """What is to be multiplied after each function."""
    found: Dict[int, Tuple[Rescale, ...]] = {}
    before = -1
    for node in schedule.nodes:
        step = schedule.steps.get(node.number)
        if step is not None and step.before:
            found[before] = found.get(before, ()) + step.before
        if step is not None and step.after:
            found[node.number] = step.after
        before = node.number
    return found
