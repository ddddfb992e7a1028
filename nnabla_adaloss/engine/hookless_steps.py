# SPDX-License-Identifier: Apache-2.0
"""What a pass without hooks does, planned once for a schedule; and whether a graph allows it."""

from __future__ import annotations

from operator import attrgetter
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import nnabla as nn

from ..core.power_of_two import is_power_of_two
from ..graph.node import Node, NodeStructure, Scaling
from ..graph.plan import GraphPlan
from ..graph.structure import GraphStructure
from ..kernels.interface import GradientsInPlace
from .leaf_gradients import TakenLeaf, leaves_of
from .scaled_weights import SwappedFactors
from .schedule import Rescale, ScaleSchedule, Step

_zeroing, _size = attrgetter("zeroing"), attrgetter("size")

# Powers of two that every storage of 16 bits holds, and that leave float32 room on both sides: above less, as
# what overflows is seen.
_SEED_RANGE_16 = 2.0**-14, 2.0**15
_SEED_RANGE_32 = 2.0**-60, 2.0**100


class HooklessLeaves:
    """Leaves that are taken for a whole pass; what is known of them is kept from pass to pass."""

    def __init__(self, leaves: Sequence[TakenLeaf], following: Mapping[int, Sequence[TakenLeaf]]) -> None:
        self.leaves = leaves
        # Where contributions are unscaled one by one: by number of a function, the leaves that it has written
        # as the next one does.
        self.following = following
        # Whether nnabla writes to the masters themselves, where these are lazily zero.
        self.direct = not (following or any(leaf.half for leaf in leaves))
        self._gradients: Optional[GradientsInPlace] = None
        self._sizes: List[int] = []

    def written(self, masters: List[nn.NdArray]) -> Tuple[Sequence[TakenLeaf], GradientsInPlace]:
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
    seed: float  # what the loss gradient starts with
    scales: Mapping[int, float]  # what each gradient carries in the end, by position
    between: Mapping[int, Tuple[Rescale, ...]]  # rescales to run after a function, by its number

    def hold_for(self, structure: GraphStructure) -> bool:
        """Whether they hold for another graph of this structure: all weights are the same there."""
        return structure.kept_keys.issuperset(self.factors.keys)


def plan_steps(
    plan: GraphPlan, schedule: ScaleSchedule, *, rounded: bool, at_random: bool, max_bytes: Optional[int]
) -> Union[HooklessSteps, str]:
    """The steps of a pass taken at once, or what stands in the way."""
    if plan.recomputes:
        return "activations are computed again in backward"
    nodes = [
        (node, step) for node in plan.nodes.values() for step in [schedule.steps.get(node.number)] if step
    ]
    factors = _factors(nodes, plan.structure, max_bytes)
    if isinstance(factors, str):
        return factors
    half = any(node.half for node in plan.nodes.values())
    leaves = _leaves(nodes, plan, rounded=rounded)
    seed, scales, steps = _with_other_seed(schedule, rounded=rounded or half)
    between = _between(schedule.structure, steps)
    low, high = _SEED_RANGE_16 if rounded or half else _SEED_RANGE_32
    seeded = seed == schedule.seed or (low <= seed <= high and is_power_of_two(seed) and not at_random)
    if between is None or not seeded:
        return "the loss gradient is brought to another scale, which its storage may not hold"
    return HooklessSteps(factors, leaves, seed, scales, between)


_Nodes = Sequence[Tuple[Node, Step]]


def _factors(
    nodes: _Nodes, structure: GraphStructure, max_bytes: Optional[int]
) -> Union[SwappedFactors, str]:
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
    needed = sum(4 * scaling.factor.size for scaling, _ in swapped.values())
    if max_bytes is not None and needed > max_bytes:
        return f"scaled weights would take {needed} bytes at once, more than {max_bytes}"
    return SwappedFactors(list(swapped.values()))


def _leaves(nodes: _Nodes, plan: GraphPlan, *, rounded: bool) -> HooklessLeaves:
    """The leaves of a pass."""
    found: Dict[int, List[TakenLeaf]] = {leaf: [] for leaf in plan.structure.leaves}
    for node, step in nodes:
        for leaf in leaves_of(node, step):
            found[leaf.leaf].append(leaf)
    following: Dict[int, List[TakenLeaf]] = {}
    for writers in found.values():
        # nnabla adds up what is exact; what is rounded, or carries another scale, is no sum yet.
        exact = not (rounded or any(leaf.half for leaf in writers)) and is_power_of_two(writers[0].scale)
        if not (exact and {leaf.scale for leaf in writers} == {writers[0].scale}):
            for leaf, after in zip(writers, writers[1:]):
                following.setdefault(leaf.function, []).append(after)
    return HooklessLeaves([writers[0] for writers in found.values()], following)


def _with_other_seed(
    schedule: ScaleSchedule, *, rounded: bool
) -> Tuple[float, Mapping[int, float], Mapping[int, Step]]:
    """The loss gradient's scale with which fewest gradients are left to be multiplied, the scales that
    gradients carry then, and the steps that are left.
    """
    nodes = schedule.structure.nodes
    seed, scales = schedule.seed, dict(schedule.scales)
    steps = dict(schedule.steps)
    # From function to function, as long as all of the gradient passes through one array: what that is
    # multiplied by it may as well be multiplied by before. Rounded numbers can leave the range on the way.
    behind: List[int] = []
    for index, node in enumerate(nodes):
        step = steps.get(node.number)
        own = node.outputs[0] if len(node.outputs) == 1 else None
        if step is not None and step.before:
            if any(b.position != own for b in step.before) or (rounded and index):
                break
            for b in step.before:
                seed *= b.factor
                scales.update((position, scales[position] * b.factor) for position in behind)
            steps[node.number] = step = step._replace(before=())
        if rounded or not _single_path(node, nodes[index + 1 :]):
            break
        if own is not None:
            behind.append(own)
        if step is not None and step.after:
            if any(b.position != node.inputs[0] for b in step.after):
                break
            for b in step.after:
                seed *= b.factor
                scales.update((position, scales[position] * b.factor) for position in behind)
            steps[node.number] = step._replace(after=())
    return seed, scales, steps


def _single_path(node: NodeStructure, following: Sequence[NodeStructure]) -> bool:
    """Whether all of the gradient that functions further on get comes through `node`, and nothing else uses
    it.
    """
    return (
        not node.leaves
        and not node.slots
        and not node.non_homogeneous
        and len(node.inputs) == 1
        and bool(following)
        and following[0].outputs == node.inputs
    )


def _between(
    structure: GraphStructure, steps: Mapping[int, Step]
) -> Optional[Dict[int, Tuple[Rescale, ...]]]:
    """What is to be multiplied after each function; None where that is before the first one."""
    found: Dict[int, Tuple[Rescale, ...]] = {}
    before: Optional[int] = None
    for node in structure.nodes:
        step = steps.get(node.number)
        if step is not None and step.before:
            if before is None:
                return None
            found[before] = found.get(before, ()) + step.before
        if step is not None and step.after:
            found[node.number] = step.after
        before = node.number
    return found
