# SPDX-License-Identifier: Apache-2.0
"""Counts what storing gradients has done to them, against fp32; adds up over batches."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .numbers import Kept


class Tally:
    """The gradients of one layer, stored in one way."""

    def __init__(self) -> None:
        self._nonzero = self._lost = self._finite = self._overflowed = 0
        self._squared_error = self._squared = 0.0

    def count(self, reference: NDArray[Any], stored: NDArray[Any]) -> None:
        """Count lost and overflowed elements.

        Args:
            reference: a gradient in fp32.
            stored: the same gradient as stored, at any scale.
        """
        finite = np.isfinite(reference)
        nonzero = finite & (reference != 0.0)
        self._nonzero += int(np.count_nonzero(nonzero))
        self._lost += int(np.count_nonzero(nonzero & (stored == 0.0)))
        self._finite += int(np.count_nonzero(finite))
        self._overflowed += int(np.count_nonzero(finite & ~np.isfinite(stored)))

    def compare(self, reference: NDArray[Any], unscaled: NDArray[Any]) -> None:
        """Add the difference of a gradient, divided by its scale, from what it is in fp32."""
        wide = reference.astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            self._squared_error += float(np.sum((unscaled.astype(np.float64) - wide) ** 2))
            self._squared += float(np.sum(wide**2))

    @property
    def nonzero(self) -> int:
        """How many elements are not zero in fp32."""
        return self._nonzero

    @property
    def error(self) -> float:
        """The relative error of all that was compared."""
        if self._squared_error == 0.0:
            return 0.0
        if not math.isfinite(self._squared_error) or self._squared == 0.0:
            return math.inf
        return math.sqrt(self._squared_error / self._squared)

    def kept(self) -> Kept:
        """The shares and the error."""
        return Kept(
            self._lost / self._nonzero if self._nonzero else 0.0,
            self._overflowed / self._finite if self._finite else 0.0,
            self.error,
        )
