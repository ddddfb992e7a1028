# SPDX-License-Identifier: Apache-2.0
"""Steps of a pass without hooks, planned once for a schedule; or the reason why a graph needs hooks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from operator import attrgetter
from typing import Dict, FrozenSet, List, Mapping, Optional, Sequence, Tuple, Union

import nnabla as nn

from ..core.components import Components, LayerSlot, NodeStructure
from ..core.schedule import Rescale, ScaleSchedule, Step
from ..emulation.rounded_storage import NativeStorage
from ..graph.graph import Graph
from ..graph.plan import GraphPlan
from ..kernels.interface import UnscalingList
from ..kernels.scratch import ScratchPool
from .leaf_gradients import Contribution, contributions_of, is_exact
from .scaled_weights import SwappedFactors
from .written_leaves import WrittenLeaves

_zeroing, _size = attrgetter("zeroing"), attrgetter("size")
_GRAD = repeat("grad")


class LeafList:
    """Leaves with one contribution each and masters that are lazily zero, so that a few calls serve them all.
    nnabla writes to the masters themselves, or, in half precision, to scratch arrays.

    Args:
        leaves: the first contributions of all leaves of the graph.
        places: which of them are in the list.
        swapped: whether scratch arrays take the place of the masters.
    """

    def __init__(self, leaves: Sequence[Contribution], places: Sequence[int], *, swapped: bool) -> None:
        self._leaves = [leaves[place] for place in places]
        self._places = None if len(places) == len(leaves) else places
        self._variables = [leaf.variable for leaf in self._leaves]
        self._scales = [leaf.scale for leaf in self._leaves]
        self._swapped = swapped
        # Kept from pass to pass, with the sizes that it is for.
        self._gradients = UnscalingList([], [])
        self._sizes: Sequence[int] = ()

    def masters_among(self, masters: List[nn.NdArray]) -> List[nn.NdArray]:
        """The masters of these leaves, of those of all leaves."""
        return masters if self._places is None else [masters[place] for place in self._places]

    def begin(self, masters: List[nn.NdArray], pool: ScratchPool) -> None:
        """Have nnabla write where these gradients are unscaled from."""
        # Kernels trust the sizes, and `reset_shape` may have changed them.
        sizes = list(map(_size, masters))
        if self._sizes != sizes:
            sources = masters
            if self._swapped:
                leaves = zip(masters, self._leaves)
                sources = [pool.get(master.shape, "gradient", leaf.leaf) for master, leaf in leaves]
            self._gradients, self._sizes = UnscalingList(sources, self._scales), sizes
        if self._swapped:
            self._gradients.masters = masters
            # A deque of no length runs an iterator in C.
            deque(map(nn.NdArray.zero, self._gradients.sources), 0)
            deque(map(setattr, self._variables, _GRAD, self._gradients.sources), 0)
        else:
            self._gradients.sources = masters

    def put_back(self, masters: List[nn.NdArray]) -> None:
        """Give the leaves their masters again."""
        if self._swapped:
            deque(map(setattr, self._variables, _GRAD, masters), 0)

    def written(self) -> Tuple[Sequence[Contribution], UnscalingList]:
        """Contributions that were written, and their gradients for unscaling."""
        gradients = self._gradients
        # An array that is still zeroing was not written.
        if not any(map(_zeroing, gradients.sources)):
            return self._leaves, gradients
        kept = [index for index, source in enumerate(gradients.sources) if not source.zeroing]
        sources = [gradients.sources[index] for index in kept]
        masters = None if gradients.masters is None else [gradients.masters[index] for index in kept]
        found = UnscalingList(sources, [self._scales[index] for index in kept], masters)
        return [self._leaves[index] for index in kept], found


@dataclass(eq=False)
class HooklessSteps:
    """Steps before, between and after the functions of a pass without hooks."""

    factors: SwappedFactors  # weights to be swapped for all of the pass
    leaves: Sequence[Contribution]  # leaves that get a gradient, each with its first contribution
    # Where contributions are unscaled one by one: by number of a function, contributions to leaves that it
    # has written and that the next one writes.
    following: Mapping[int, Sequence[Contribution]]
    between: Mapping[int, Tuple[Rescale, ...]]  # rescales to run after a function, by its number
    _written: Optional[WrittenLeaves] = None  # by the last pass

    @cached_property
    def lists(self) -> Tuple[List[LeafList], List[Contribution]]:
        """Leaves that go as lists where all masters are lazily zero, and the others."""
        several = {after.leaf for contributions in self.following.values() for after in contributions}
        direct, swapped, others = [], [], []
        for place, leaf in enumerate(self.leaves):
            if leaf.leaf not in several and not leaf.half:
                direct.append(place)
            elif leaf.leaf not in several and not (leaf.own_references or leaf.others):
                swapped.append(place)
            else:
                others.append(leaf)
        lists = [LeafList(self.leaves, direct, swapped=False), LeafList(self.leaves, swapped, swapped=True)]
        return [one for one, places in zip(lists, (direct, swapped)) if places], others

    def written(
        self, contributions: Sequence[Contribution], plan: GraphPlan, components: Components
    ) -> WrittenLeaves:
        """Contributions of a pass as written leaves, those of the pass before where they are the same."""
        last = self._written
        if last is None or last.components is not components or last.contributions != contributions:
            self._written = last = WrittenLeaves(contributions, plan, components)
        return last

    def hold_for(self, plan: GraphPlan) -> bool:
        """Return whether a graph of this plan has the same weights and leaves, for which the steps hold."""
        return plan.kept_keys.issuperset(self._kept_keys)

    @cached_property
    def _kept_keys(self) -> FrozenSet[int]:
        return frozenset([*self.factors.keys, *(hash(leaf.variable) for leaf in self.leaves)])


def plan_steps(
    graph: Graph, plan: GraphPlan, schedule: ScaleSchedule, storage: NativeStorage
) -> Union[HooklessSteps, str]:
    """Plan the steps of a pass without hooks; where it needs hooks, return the reason."""
    if plan.recomputes:
        return "activations are computed again in backward"
    steps = schedule.steps
    nodes = [(node, steps[node.number]) for node in plan.nodes if node.number in steps]
    factors = _factors(nodes, graph, plan)
    if isinstance(factors, str):
        return factors
    return HooklessSteps(factors, *_leaves(nodes, graph, plan, storage), _between(schedule))


_Nodes = Sequence[Tuple[NodeStructure, Step]]


def _factors(nodes: _Nodes, graph: Graph, plan: GraphPlan) -> Union[SwappedFactors, str]:
    found: Dict[int, Tuple[LayerSlot, float]] = {}
    for node, step in nodes:
        for slot, alpha in zip(node.slots, step.alphas):
            known = found.setdefault(slot.factor, (slot, alpha))
            if known[1] != alpha:
                return f"{slot.layer} shares a weight with a layer of another scale"
    swapped = [(slot, alpha) for slot, alpha in found.values() if alpha != 1.0]
    for slot, _ in swapped:
        if slot.factor not in plan.swappable:
            return f"others read what {slot.layer} is multiplied by"
    return SwappedFactors(graph, swapped)


def _leaves(
    nodes: _Nodes, graph: Graph, plan: GraphPlan, storage: NativeStorage
) -> Tuple[List[Contribution], Dict[int, List[Contribution]]]:
    """First contributions of all leaves, and those that follow and are unscaled one by one."""
    found: Dict[int, List[Contribution]] = {leaf: [] for leaf in plan.leaves}
    for node, step in nodes:
        for leaf in contributions_of(graph, plan, node, step):
            found[leaf.leaf].append(leaf)
    following: Dict[int, List[Contribution]] = {}
    for writers in [writers for writers in found.values() if len(writers) > 1]:
        # nnabla adds up what is exact; what is rounded, or carries another scale, is no sum yet.
        exact = all(is_exact(leaf, storage) for leaf in writers)
        if not (exact and {leaf.scale for leaf in writers} == {writers[0].scale}):
            for leaf, after in zip(writers, writers[1:]):
                following.setdefault(leaf.function, []).append(after)
    return [writers[0] for writers in found.values()], following


def _between(schedule: ScaleSchedule) -> Dict[int, Tuple[Rescale, ...]]:
    """Rescales to run after each function, by its number; none is due before the first one."""
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
