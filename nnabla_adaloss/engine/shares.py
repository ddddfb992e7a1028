# SPDX-License-Identifier: Apache-2.0
"""What is measured in each iteration, so that all arrays have been measured once in `measure_every` of them.

The gradients that one iteration measures stay in memory until its backward ends: an even share bounds that
memory, and makes no iteration dearer than another. Small shares are put together, in the iterations right
before the next choice: there a call costs more than what it measures.
"""

from __future__ import annotations

import math
from typing import AbstractSet, List, NamedTuple, Sequence

from ..graph.structure import GraphStructure

# Elements that a share holds at least, if there are as many.
_LEAST = 2**16


class Share(NamedTuple):
    """What one iteration measures. Variables go by position."""

    gradients: Sequence[int]
    weights: Sequence[int]
    activations: Sequence[int]  # that layers multiply by: nnabla frees them in backward
    leaves: AbstractSet[int]  # whose gradients, which every pass looks at, count for the components
    last: bool  # whether everything has been measured when the pass ends

    @property
    def empty(self) -> bool:
        """Whether nothing is measured."""
        return not (self.gradients or self.weights or self.activations or self.leaves)


def shares_of(
    structure: GraphStructure,
    gradients: AbstractSet[int],
    data: AbstractSet[int],
    count: int,
) -> List[Share]:
    """Divide what is measured into shares of about the same size.

    The gradient of the loss itself is left out: nnabla does not keep it, and it is what backward is given.
    """
    sizes = [math.prod(shape) for shape in structure.described.shapes]
    wanted = [p for p in structure.gradients if p in gradients and p not in structure.roots]
    known_again = structure.described.kept.keys()
    kept = _divided(wanted, sizes, count)
    weights = _divided(sorted(data & known_again), sizes, count)
    activations = _divided(sorted(data - known_again), sizes, count)
    written = dict.fromkeys(leaf for node in structure.nodes for leaf in node.leaves)
    leaves = _divided(list(written), sizes, count)
    return [
        Share(*parts[:3], frozenset(parts[3]), number == count - 1)
        for number, parts in enumerate(zip(kept, weights, activations, leaves))
    ]


def _divided(positions: Sequence[int], sizes: Sequence[int], count: int) -> List[List[int]]:
    """Positions in so many lists, of which the last ones have about the same size, and the others nothing.

    The largest come first, each to the smallest list.
    """
    used = min(count, max(1, sum(sizes[position] for position in positions) // _LEAST))
    lists: List[List[int]] = [[] for _ in range(used)]
    filled = [0] * used
    for position in sorted(positions, key=lambda p: (-sizes[p], p)):
        smallest = filled.index(min(filled))
        lists[smallest].append(position)
        filled[smallest] += max(sizes[position], 1)
    return [[] for _ in range(count - used)] + lists
