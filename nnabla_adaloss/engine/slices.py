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
    """Number of slices, of `count` the first ones, that are surely empty because the graph is small."""
    # Leaves that functions in half write, or all if an emulation `rounds`, are in every slice: none is empty.
    if rounds or any(node.half for node in plan.nodes):
        return 0
    # All arrays together, measured or not, fill at least as many slices as the measured ones.
    return count - _number_filled(sum(map(math.prod, plan.described.shapes)), count)


def slices_of(
    plan: GraphPlan,
    request: StatisticsRequest,
    count: int,
    *,
    rounds: bool,
    excluded_leaves: AbstractSet[int] = frozenset(),  # see `PreparedGraph.accumulating_leaves`
) -> List[Optional[Slice]]:
    """Divide the arrays to measure into `count` slices, one for each iteration; None: nothing."""
    sizes = [math.prod(shape) for shape in plan.described.shapes]
    measured = {*plan.largest_gradients} | request.gradients | request.watched
    parameters, data = plan.described.kept.keys(), request.data
    gradients = [p for p in plan.gradients if p in measured and p not in plan.roots]  # the root's is known
    weights, activations = sorted(data & parameters), sorted(data - parameters)
    leaves = list(dict.fromkeys(leaf for node in plan.nodes for leaf in node.leaves))
    parts = [_divide(all_of, sizes, count) for all_of in (gradients, weights, activations, leaves)]
    # Leaves that can overflow in half are in every slice: one of two alternating datasets could miss theirs.
    always = frozenset(leaf for node in plan.nodes if rounds or node.half for leaf in node.leaves)
    slices = [Slice(g, w, a, always.union(own), last=False) for g, w, a, own in zip(*parts)]
    # An empty slice becomes None, except the last one, whose `last` ends a measurement of everything.
    slices[-1] = slices[-1]._replace(last=True)
    return [one._replace(leaves=one.leaves - excluded_leaves) if any(one) else None for one in slices]


def _divide(positions: Sequence[int], sizes: Sequence[int], count: int) -> List[List[int]]:
    """Divide positions into `count` lists of similar size. Small arrays fill the last lists only."""
    filled = _number_filled(sum(sizes[position] for position in positions), count)
    lists: List[List[int]] = [[] for _ in range(filled)]
    elements = [0] * filled  # in each list
    # Larger arrays go first, each into the smallest list. Empty arrays add 1, or one list would get them all.
    for position in sorted(positions, key=lambda p: (-sizes[p], p)):
        smallest = elements.index(min(elements))
        lists[smallest].append(position)
        elements[smallest] += max(sizes[position], 1)
    return [[] for _ in range(count - filled)] + lists


def _number_filled(size: int, count: int) -> int:
    """Number of slices, of `count`, among which arrays of this total size are divided."""
    # Measuring small arrays takes less time than a call of a kernel: better many in few slices.
    return min(count, max(1, size // _LEAST))
