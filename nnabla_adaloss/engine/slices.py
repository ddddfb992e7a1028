# SPDX-License-Identifier: Apache-2.0
"""Slices of the arrays of a graph: each iteration measures one, so that few gradients stay in memory."""

from __future__ import annotations

import math
from typing import AbstractSet, List, NamedTuple, Sequence

from ..graph.plan import GraphPlan

# Elements that a slice holds at least, if there are as many.
_LEAST = 2**16


class Slice(NamedTuple):
    """Arrays that one iteration measures, by position of their variables."""

    gradients: Sequence[int]
    weights: Sequence[int]
    activations: Sequence[int]  # that layers multiply by: nnabla frees them in backward
    leaves: AbstractSet[int]  # whose gradients, which every pass unscales, count for the components
    last: bool  # whether everything has been measured when the pass ends


def slices_of(
    plan: GraphPlan, gradients: AbstractSet[int], data: AbstractSet[int], count: int
) -> List[Slice]:
    """Divide gradients and data into `count` slices, one for each iteration."""
    sizes = [math.prod(shape) for shape in plan.described.shapes]
    wanted = [p for p in plan.gradients if p in gradients and p not in plan.roots]
    kept = plan.described.kept.keys()
    written = dict.fromkeys(leaf for node in plan.nodes for leaf in node.leaves)
    parts = [
        _divided(positions, sizes, count)
        for positions in (wanted, sorted(data & kept), sorted(data - kept), list(written))
    ]
    return [
        Slice(of_gradients, weights, activations, frozenset(leaves), last=number == count - 1)
        for number, (of_gradients, weights, activations, leaves) in enumerate(zip(*parts))
    ]


def _divided(positions: Sequence[int], sizes: Sequence[int], count: int) -> List[List[int]]:
    """Divide positions into `count` lists: empty ones, then those that have about the same size."""
    # A call takes longer than to measure small arrays.
    used = min(count, max(1, sum(sizes[position] for position in positions) // _LEAST))
    lists: List[List[int]] = [[] for _ in range(used)]
    filled = [0] * used
    for position in sorted(positions, key=lambda p: (-sizes[p], p)):
        smallest = filled.index(min(filled))
        lists[smallest].append(position)
        filled[smallest] += max(sizes[position], 1)
    return [[] for _ in range(count - used)] + lists
