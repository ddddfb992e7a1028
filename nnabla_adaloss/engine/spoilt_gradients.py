# SPDX-License-Identifier: Apache-2.0
"""Gradients that a batch has left not finite, where nobody zeroes them: those that no solver has."""

from __future__ import annotations

from typing import AbstractSet, List, Mapping, Tuple

import nnabla as nn

from ..kernels import Kernels


class SpoiltGradients:
    """Sets such gradients apart while a pass runs: a sum with an infinity or a NaN tells nothing."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.keys: AbstractSet[int] = frozenset()
        self._apart: List[Tuple[int, nn.NdArray, nn.NdArray]] = []

    def set_apart(self, leaves: Mapping[int, nn.Variable]) -> bool:
        """Zero the gradients that are still not finite, and keep what they hold; False when none is."""
        for key in self.keys & leaves.keys():
            gradient = leaves[key].grad
            if gradient.zeroing or self._kernels.all_finite([gradient]):
                continue
            held = nn.NdArray(gradient.shape)
            self._kernels.scaled_copy(gradient, held, 1.0)
            self._apart.append((key, gradient, held))
            gradient.zero()
        return bool(self._apart)

    def put_back(self, nonfinite: AbstractSet[int]) -> None:
        """Add what was set apart to what the pass has written."""
        for _, gradient, held in self._apart:
            self._kernels.unscale_add(held, gradient, 1.0, accumulate=not gradient.zeroing)
        self.keys = nonfinite | {key for key, _, _ in self._apart}
        self._apart = []
