# SPDX-License-Identifier: Apache-2.0
"""Slices of a graph's arrays: each iteration measures one, so that few gradients stay in memory."""

from __future__ import annotations

import math
from typing import AbstractSet, FrozenSet, List, NamedTuple, Optional, Sequence

from ..graph.plan import GraphPlan
from .latest_statistics import StatisticsRequest

# Slices that are not empty hold at least this many elements on average; a smaller graph has one such slice.
_LEAST = 2**16


class Slice(NamedTuple):
    """Arrays that a pass measures, by position of their variables."""

    gradients: Sequence[int]
    weights: Sequence[int]
    activations: Sequence[int]  # weights of layers that are no parameters: nnabla frees them in backward
    leaves: FrozenSet[int]  # leaves whose amaxes, found by unscaling in every pass, components take
    last: bool  # True if all arrays have been measured after it


def empty_slices(plan: GraphPlan, count: int, *, rounds: bool) -> int:
    """Number of first slices, of `count`, that are empty whatever is measured: the graph is too small."""
    # Leaves that functions in half write, or all leaves if an emulation `rounds`, are in every slice.
    if rounds or any(node.half for node in plan.nodes):
        return 0
    return count - _used(sum(map(math.prod, plan.described.shapes)), count)


def slices_of(
    plan: GraphPlan,
    request: StatisticsRequest,
    count: int,
    *,
    rounds: bool,
    accumulating: AbstractSet[int] = frozenset(),  # leaves left out: see `PreparedGraph.accumulating`
) -> List[Optional[Slice]]:
    """Divide the arrays to measure into `count` slices, one for each iteration; None: nothing."""
    sizes = [math.prod(shape) for shape in plan.described.shapes]
    measured = {*plan.largest_gradients} | request.gradients | request.watched
    kept, data = plan.described.kept.keys(), request.data
    gradients = [p for p in plan.gradients if p in measured and p not in plan.roots]  # the root's is known
    weights, activations = sorted(data & kept), sorted(data - kept)
    leaves = list(dict.fromkeys(leaf for node in plan.nodes for leaf in node.leaves))
    parts = [_divided(all_of, sizes, count) for all_of in (gradients, weights, activations, leaves)]
    # Leaves written in half (all, if `rounds`) are in every slice: no batch of alternating ones is missed.
    always = frozenset(leaf for node in plan.nodes if rounds or node.half for leaf in node.leaves)
    slices = [Slice(g, w, a, always.union(own), last=False) for g, w, a, own in zip(*parts)]
    # An empty slice measures nothing, except the last one: it completes a measurement of everything.
    slices[-1] = slices[-1]._replace(last=True)
    return [one._replace(leaves=one.leaves - accumulating) if any(one) else None for one in slices]


def _divided(positions: Sequence[int], sizes: Sequence[int], count: int) -> List[List[int]]:
    """Divide positions into `count` lists of similar size; if arrays are small, the first stay empty."""
    used = _used(sum(sizes[position] for position in positions), count)
    lists: List[List[int]] = [[] for _ in range(used)]
    filled = [0] * used  # elements in each list
    # Larger arrays go first, each into the list with the fewest elements; empty ones count 1, to be spread.
    for position in sorted(positions, key=lambda p: (-sizes[p], p)):
        smallest = filled.index(min(filled))
        lists[smallest].append(position)
        filled[smallest] += max(sizes[position], 1)
    return [[] for _ in range(count - used)] + lists


def _used(size: int, count: int) -> int:
    """Number of slices, of `count`, among which arrays of this total size are divided."""
    # Measuring small arrays takes less time than a call of a kernel: better many in few slices.
    return min(count, max(1, size // _LEAST))
