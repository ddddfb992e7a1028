# SPDX-License-Identifier: Apache-2.0
"""Leaves that share a gradient array, such as a weight and its reshaped view."""

from __future__ import annotations

from typing import Callable, Dict, List, Mapping, Sequence, Tuple

import nnabla as nn

from ..graph.graph import Graph
from ..graph.names import ParameterNames
from ..kernels.arrays import places_of


class SharedGradients:
    """Finds leaves that share a gradient array; ValueError if two overlap otherwise."""

    def __init__(self) -> None:
        # Keys of the last compared leaves, and the result by index.
        self._keys: List[int] = []
        self._first: Mapping[int, int] = {}
        # Parameters of all graphs so far, by key, and addresses of their gradients at one moment.
        self._parameters: Dict[int, nn.Variable] = {}
        self._places: Dict[int, Tuple[int, int]] = {}

    def find(self, graph: Graph, names: ParameterNames, context: nn.Context) -> Dict[int, int]:
        """Map positions of leaves to the first leaf, preferably a parameter, with the same gradient array."""
        # Parameters first, in an order that graphs of one topology have in common.
        positions = sorted(graph.needed, key=lambda p: (graph.keys[p] not in names, p))
        keys = [graph.keys[p] for p in positions]
        if keys != self._keys:
            leaves = [graph.leaves[p] for p in positions]
            places = self._places
            # Parameters keep their gradients; a leaf that is new needs a comparison with all.
            if not places.keys() >= {*keys}:
                # Freed memory is reused, so addresses of different moments cannot be compared.
                leaves_so_far = {**self._parameters, **dict(zip(keys, leaves))}
                gradients = [leaf.grad for leaf in leaves_so_far.values()]
                places = dict(zip(leaves_so_far, places_of(gradients, context)))
                self._parameters = {key: leaf for key, leaf in leaves_so_far.items() if key in names}
                self._places = {key: places[key] for key in self._parameters}
            self._first = _first_at_same_place(
                [places[key] for key in keys],
                lambda index: names.get(keys[index], f"an input of shape {leaves[index].shape}"),
            )
            self._keys = keys
        return {positions[later]: positions[first] for later, first in self._first.items()}


def _first_at_same_place(places: Sequence[Tuple[int, int]], name_of: Callable[[int], str]) -> Dict[int, int]:
    """Map indices of arrays, given by begin and end in memory, to the first one at the same place."""
    # Reversed, so that of several the first one stays; empty arrays share nothing.
    first = {place: index for index, place in reversed([*enumerate(places)]) if place[0] < place[1]}
    ordered = sorted(first)
    for before, after in zip(ordered, ordered[1:]):
        if after[0] < before[1]:
            names = " and ".join(map(name_of, (first[before], first[after])))
            raise ValueError(
                f"the gradients of {names} overlap in memory, but are not one array: their common part would "
                "be unscaled twice; give each leaf a gradient of its own, such as leaf.grad = "
                "nn.NdArray(leaf.shape)"
            )
    return {index: first[place] for index, place in enumerate(places) if first.get(place, index) != index}
