# SPDX-License-Identifier: Apache-2.0
"""Gradients as they were before a batch, so that it can be repeated."""

from __future__ import annotations

from typing import Dict, List, Tuple

import nnabla as nn

from ..kernels import Kernels
from ..kernels.copies import copy_arrays
from .leaf_arrays import LeafArrays


class KeptGradients:
    """Copies of the gradients that a batch adds to; those that are lazily zero need none.

    Args:
        kernels: the kernels that copy.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._copies: Dict[int, nn.NdArray] = {}
        self._kept: List[Tuple[nn.NdArray, nn.NdArray]] = []
        self._zero: List[nn.NdArray] = []

    def save(self, gradients: LeafArrays) -> None:
        """Keep gradients as they are."""
        self._kept, self._zero = [], gradients.arrays
        if gradients.all_zero:
            return
        self._zero = [gradient for gradient in gradients.arrays if gradient.zeroing]
        for key, gradient in zip(gradients.keys, gradients.arrays):
            if gradient.zeroing:
                continue
            copy = self._copies.get(key)
            if copy is None or copy.shape != gradient.shape:
                copy = self._copies[key] = nn.NdArray(gradient.shape)
            self._kept.append((gradient, copy))
        copy_arrays(self._kernels, self._kept)

    def restore(self) -> None:
        """Put them back."""
        for gradient in self._zero:
            gradient.zero()
        copy_arrays(self._kernels, [(copy, gradient) for gradient, copy in self._kept])
