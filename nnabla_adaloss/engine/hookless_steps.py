# SPDX-License-Identifier: Apache-2.0
"""Steps of a pass without hooks, planned once per schedule; or the reason for hooks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, repeat
from typing import Dict, FrozenSet, List, Mapping, Optional, Sequence, Tuple

import nnabla as nn

from ..core.components import Components, LayerInput
from ..core.schedule import Rescale, ScaleSchedule
from ..kernels.arrays import ScratchPool, is_zeroing, size_of
from ..kernels.interface import UnscalingList
from .leaf_gradients import Contribution, WrittenLeaves, contributions_of
from .prepared_graph import PreparedGraph
from .scaled_weights import SwappedWeights

_GRAD = repeat("grad")


class LeafList:
    """Leaves that are unscaled together in passes that begin with all masters set to zero."""

    def __init__(self, first: Sequence[Contribution], places: Sequence[int], *, swapped: bool) -> None:
        # `first`: the first contribution to each leaf of the graph; `places`: indices in it of these leaves.
        self.places, self._contributions = places, [first[place] for place in places]
        self._variables = [one.variables[0] for one in self._contributions]  # if swapped, only this
        # True: scratch arrays replace the masters, which functions in half would convert to half.
        self._swapped = swapped
        # Arguments for unscaling, kept from the last pass, and the sizes of their arrays.
        self._gradients = UnscalingList([], [])
        self._sizes: Sequence[int] = ()

    def begin(self, masters: Sequence[nn.NdArray], pool: ScratchPool) -> None:
        """Prepare unscaling into these masters; if swapped, let nnabla write to zeroed scratch arrays."""
        # The last pass's arguments contain sizes: they are used again unless `reset_shape` has changed these.
        sizes = list(map(size_of, masters))
        if self._sizes != sizes:
            sources = masters
            if self._swapped:
                pairs = zip(masters, self._contributions)
                sources = [pool.get(master.shape, "gradient", one.leaf) for master, one in pairs]
            self._gradients = UnscalingList(sources, [one.scale for one in self._contributions])
            self._sizes = sizes
        if not self._swapped:
            self._gradients.sources = masters
            return
        self._gradients.masters = masters
        # A deque of length 0 runs an iterator in C: there may be hundreds of leaves.
        deque(map(nn.NdArray.zero, self._gradients.sources), 0)
        deque(map(setattr, self._variables, _GRAD, self._gradients.sources), 0)

    def put_back(self, masters: Sequence[nn.NdArray]) -> None:
        """Restore the masters of the leaves."""
        if self._swapped:
            deque(map(setattr, self._variables, _GRAD, masters), 0)

    def list_written(self) -> Tuple[Sequence[Contribution], UnscalingList]:
        """List the written contributions, and their gradients for unscaling."""
        gradients = self._gradients
        # A still lazily zero array was not written.
        if not any(map(is_zeroing, gradients.sources)):
            return self._contributions, gradients
        indices = [index for index, source in enumerate(gradients.sources) if not source.zeroing]
        written, sources = [self._contributions[i] for i in indices], [gradients.sources[i] for i in indices]
        masters = None if gradients.masters is None else [gradients.masters[i] for i in indices]
        return written, UnscalingList(sources, [one.scale for one in written], masters)


@dataclass(eq=False)
class HooklessSteps:
    """Steps before, between and after the functions of a pass without hooks."""

    weights: SwappedWeights  # weights to be swapped for all of the pass
    leaves: Sequence[Contribution]  # leaves with a gradient, each with its first contribution
    # By number of a function: the next contributions to its leaves, if each is unscaled before the next.
    next_contributions: Mapping[int, Sequence[Contribution]]
    rescales_after: Mapping[int, Tuple[Rescale, ...]]  # by number of a function
    _last_written: Optional[WrittenLeaves] = None  # of the last pass

    @cached_property
    def leaf_lists(self) -> Tuple[List[LeafList], List[Contribution]]:
        """Lists for passes that begin with zero masters, and leaves in none, for `LeafGradients`."""
        # Leaves unscaled several times in a pass; for others nnabla sums all contributions, at one scale.
        repeated = {later.leaf for following in self.next_contributions.values() for later in following}
        direct, swapped, one_by_one = [], [], []
        for place, first in enumerate(self.leaves):
            # A function in half would convert the master to half: a scratch array replaces it, unless the
            # function, such as F.lstm, keeps references to the master, or several Variables share it.
            has_references = first.node.own_references or len(first.variables) > 1
            if first.leaf in repeated or (first.node.half and has_references):
                one_by_one.append(first)
            elif first.node.half:
                swapped.append(place)
            else:
                direct.append(place)
        lists = [LeafList(self.leaves, direct, swapped=False), LeafList(self.leaves, swapped, swapped=True)]
        return [one for one in lists if one.places], one_by_one

    def written_leaves(self, contributions: Sequence[Contribution], components: Components) -> WrittenLeaves:
        """`WrittenLeaves` of these contributions: the last pass's, with its caches, if it had equal ones."""
        last = self._last_written
        if last is None or last.components is not components or last.contributions != contributions:
            self._last_written = last = WrittenLeaves(contributions, components)
        return last

    @cached_property
    def keys(self) -> FrozenSet[int]:
        """Keys of the weights and leaves: the steps are valid for graphs that have all of them."""
        # A later contribution may be to another Variable, which shares the gradient array.
        contributions = chain(self.leaves, *self.next_contributions.values())
        written = (hash(variable) for one in contributions for variable in one.variables)
        return frozenset(chain(self.weights.keys, written))


def plan_steps(prepared: PreparedGraph, schedule: ScaleSchedule) -> Tuple[Optional[HooklessSteps], str]:
    """Plan a pass without hooks: its steps and `"hookless"`; or, if it needs hooks, None and the reason."""
    plan, steps = prepared.plan, schedule.steps
    nodes = [node for node in plan.nodes if node.number in steps]
    if any(plan.described.recomputed):
        # Recomputing would read the scaled copies of weights.
        return None, "activations are computed again in backward"
    # One scaled copy of a weight serves all of the pass: its layers need one alpha, no others may read it.
    by_weight: Dict[int, Tuple[LayerInput, float]] = {}
    for node in nodes:
        for layer_input, alpha in zip(node.layer_inputs, steps[node.number].alphas):
            _, first_alpha = by_weight.setdefault(layer_input.weight, (layer_input, alpha))
            if alpha != first_alpha:
                return None, f"{layer_input.layer} shares a weight with a layer of another scale"
    swapped = [(layer_input, alpha) for layer_input, alpha in by_weight.values() if alpha != 1.0]
    for layer_input, _ in swapped:
        if layer_input.weight not in plan.swappable:
            return None, f"others read the weight of {layer_input.layer}"
    # Contributions to each leaf, in the order of the masters.
    by_leaf: Dict[int, List[Contribution]] = {leaf: [] for leaf in plan.leaves}
    for node in nodes:
        for contribution in contributions_of(prepared, node, steps[node.number]):
            by_leaf[contribution.leaf].append(contribution)
    next_contributions: Dict[int, List[Contribution]] = {}
    for writers in by_leaf.values():
        # nnabla may sum exact contributions at one scale: the sum is divided once. If one is rounded or at
        # another scale, each is divided before the next function writes.
        if not all(one.exact and one.scale == writers[0].scale for one in writers):
            for earlier, later in zip(writers, writers[1:]):
                next_contributions.setdefault(earlier.node.number, []).append(later)
    rescales_after = {number: step.after for number, step in steps.items() if step.after}
    # Rescaling before a function is done after the previous one. The first needs none: the seed is scaled.
    for previous, node in zip(plan.nodes, plan.nodes[1:]):
        if node.number in steps and steps[node.number].before:
            after = rescales_after.get(previous.number, ())
            rescales_after[previous.number] = after + steps[node.number].before
    weights, leaves = SwappedWeights(prepared.graph, swapped), [writers[0] for writers in by_leaf.values()]
    return HooklessSteps(weights, leaves, next_contributions, rescales_after), "hookless"
