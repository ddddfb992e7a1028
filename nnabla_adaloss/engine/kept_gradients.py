# SPDX-License-Identifier: Apache-2.0
"""Gradients as they were before a batch, so that it can be repeated."""

from __future__ import annotations

from typing import List

import nnabla as nn

from ..kernels import Kernels
from .kept_arrays import KeptArrays
from .leaf_arrays import LeafArrays


class KeptGradients:
    """Copies of the gradients that a batch adds to; those that are lazily zero need none.

    Args:
        kernels: the kernels that copy.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kept = KeptArrays(kernels)
        self._arrays: List[nn.NdArray] = []
        self._all_zero = False

    def save(self, gradients: LeafArrays) -> None:
        """Keep gradients as they are."""
        self._arrays, self._all_zero = gradients.arrays, gradients.all_zero
        if not self._all_zero:
            self._kept.save(self._arrays)

    def restore(self) -> None:
        """Put them back."""
        if not self._all_zero:
            self._kept.restore(self._arrays)
            return
        for gradient in self._arrays:
            gradient.zero()
