# SPDX-License-Identifier: Apache-2.0
"""Leaves whose gradients nnabla writes in one backward pass without anybody between its functions."""

from __future__ import annotations

from operator import attrgetter
from typing import Dict, List, Optional, Sequence, Tuple

import nnabla as nn

from ...kernels.interface import GradientsInPlace
from ..leaf_gradients import LeafArrays, TakenLeaf

_zeroing, _size = attrgetter("zeroing"), attrgetter("size")


class HooklessLeaves:
    """Leaves that are taken at once; what is known of them is kept from pass to pass.

    Args:
        leaves: the leaves, in the order of the plan's.

    Attributes:
        leaves: the leaves.
        scales: what the gradient of each carries, by position.
    """

    def __init__(self, leaves: Sequence[TakenLeaf]) -> None:
        self.leaves = leaves
        self.scales: Dict[int, float] = {leaf.leaf: leaf.scale for leaf in leaves}
        self._positions = [leaf.leaf for leaf in leaves]
        self._direct = not any(leaf.half for leaf in leaves)
        self._gradients: Optional[GradientsInPlace] = None
        self._sizes: List[int] = []

    def are_written_directly(self, found: LeafArrays) -> bool:
        """Whether nnabla writes them to the masters themselves, and adds them to nothing."""
        return found.all_zero and self._direct

    def written(self, masters: List[nn.NdArray]) -> Tuple[List[int], GradientsInPlace]:
        """Positions and gradients of what was written to `masters`, which are to be unscaled in place."""
        # An array that is still zeroing was not written.
        if any(map(_zeroing, masters)):
            kept = [(leaf, master) for leaf, master in zip(self.leaves, masters) if not master.zeroing]
            return [leaf.leaf for leaf, _ in kept], _in_place(kept)
        # Kernels trust the sizes, and `reset_shape` may have changed them.
        sizes = list(map(_size, masters))
        if self._gradients is None or self._sizes != sizes:
            self._sizes, self._gradients = sizes, _in_place(list(zip(self.leaves, masters)))
        self._gradients.arrays = masters
        return self._positions, self._gradients


def _in_place(pairs: Sequence[Tuple[TakenLeaf, nn.NdArray]]) -> GradientsInPlace:
    return GradientsInPlace([master for _, master in pairs], [leaf.scale for leaf, _ in pairs])
