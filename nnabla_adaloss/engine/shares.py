# SPDX-License-Identifier: Apache-2.0
"""What is measured in each iteration, so that all arrays have been measured once in `measure_every` of them.

The gradients that one iteration measures stay in memory until its backward ends: an even share bounds that
memory, and makes no iteration dearer than another.
"""

from __future__ import annotations

import math
from typing import AbstractSet, Dict, Iterable, List, NamedTuple, Sequence, Set, Tuple

from ..graph.components import Components
from ..graph.structure import GraphStructure


class Share(NamedTuple):
    """What one iteration measures. Variables go by position.

    Attributes:
        gradients: variables whose gradients are measured.
        data: weights and activations of layers.
        leaves: leaves whose gradients, which every pass looks at, count for the components: by position the
            component of each.
        last: whether everything has been measured when the pass ends.
    """

    gradients: Sequence[int]
    data: Sequence[int]
    leaves: Dict[int, int]
    last: bool


def shares_of(
    structure: GraphStructure,
    components: Components,
    gradients: AbstractSet[int],
    data: AbstractSet[int],
    count: int,
) -> List[Share]:
    """Divide what is measured into shares of about the same size.

    The gradient of the loss itself is left out: nnabla does not keep it, and it is what backward is given.

    Args:
        structure: how the graph is built.
        components: its components.
        gradients: variables whose gradients choices ask for.
        data: variables whose data they ask for.
        count: how many shares.
    """
    sizes = [math.prod(shape) for shape in structure.described.shapes]
    wanted = [p for p in structure.gradients if p in gradients and p not in structure.roots]
    kept = _divided(wanted, sizes, count)
    read = _divided(sorted(data), sizes, count)
    leaves = list(_components_of_leaves(structure, components))
    return [Share(kept[k], read[k], dict(leaves[k::count]), k == count - 1) for k in range(count)]


def component_of_leaf(structure: GraphStructure, components: Components, leaf: int, number: int) -> int:
    """The component that the gradient of a leaf belongs to, which the function `number` writes."""
    if leaf in components.of and any(slot.target == leaf for slot in structure.by_number[number].slots):
        return components.of[leaf]
    return components.producers[number]


def _components_of_leaves(structure: GraphStructure, components: Components) -> Iterable[Tuple[int, int]]:
    seen: Set[int] = set()
    for node in structure.nodes:
        for leaf in node.leaves:
            if leaf not in seen:
                seen.add(leaf)
                yield leaf, component_of_leaf(structure, components, leaf, node.number)


def _divided(positions: Sequence[int], sizes: Sequence[int], count: int) -> List[List[int]]:
    """Positions in so many lists of about the same size: the largest first, each to the smallest list."""
    lists: List[List[int]] = [[] for _ in range(count)]
    filled = [0] * count
    for position in sorted(positions, key=lambda p: (-sizes[p], p)):
        smallest = filled.index(min(filled))
        lists[smallest].append(position)
        filled[smallest] += max(sizes[position], 1)
    return lists
