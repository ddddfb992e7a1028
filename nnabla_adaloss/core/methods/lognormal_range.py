# SPDX-License-Identifier: Apache-2.0
"""Loss scale of a gradient alone, taking its magnitudes for lognormally distributed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats import FLOAT32
from ..power_of_two import clamp_scale
from ..validation import open_share
from .method import Method, Needs, Range


@dataclass(frozen=True)
class LognormalRange(Method):
    """The scale that keeps all but a share p of a gradient above u_min, for functions without a weight.

    With m and s the mean and deviation of ln|g| over the non-zero elements:
    min(max(exp(ln u_min - m - s sqrt(2) erfinv(2p - 1)), 1), u_max / max|g|); 1 when s is 0.
    Source: Zhao et al. 2019 (arXiv 1910.12385).

    Attributes:
        n_uf_threshold: p, accepted share of elements that underflow; between 0 and 1.

    Example:
        >>> g = np.array([1e-9, 1e-8, 1e-7])
        >>> round(LognormalRange().scale(g, None, range=Range(6e-8, 65504.0), fan_in=1))
        2001
    """

    needs = Needs.ARRAYS
    n_uf_threshold: float = 1e-3

    def __post_init__(self) -> None:
        open_share("n_uf_threshold", self.n_uf_threshold, usual=1e-3)

    def scale(self, g: NDArray[Any], W: None, *, range: Range, fan_in: float) -> float:
        """The scale from the logarithms of the elements."""
        # float32 moments, as published; a float64 element beyond float32 counts as its largest number.
        magnitudes = np.minimum(np.abs(np.asarray(g)), FLOAT32.max).astype(np.float32)
        nonzero = magnitudes[magnitudes > 0]
        logarithms = np.log(nonzero)
        deviation = float(logarithms.std()) if logarithms.size else 0.0
        if deviation == 0.0:
            return 1.0
        quantile = NormalDist().inv_cdf(self.n_uf_threshold)  # sqrt(2) erfinv(2p - 1)
        exponent = math.log(range.u_min) - float(logarithms.mean()) - deviation * quantile
        limit = range.u_max / float(np.abs(np.asarray(g, np.float64)).max())
        # exp overflows beyond 709; the limit decides long before.
        return clamp_scale(min(max(math.exp(min(exponent, 709.0)), 1.0), limit))
