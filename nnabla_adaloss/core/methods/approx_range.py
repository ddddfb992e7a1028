# SPDX-License-Identifier: Apache-2.0
"""Loss scale at which a share p of a gradient underflows, if it is normally or lognormally distributed.

The formulas are those of `get_loss_scale_by_approx_range`; p is `n_uf_threshold`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Optional

import numpy as np

from ..formats import FLOAT32
from ..power_of_two import clamp_scale
from ..statistics import ArrayStatistics
from ..validation import number
from .method import Method, Needs, Range, overflow_limit


@dataclass(frozen=True)
class ApproxRange(Method):
    """Smallest scale that keeps all but a share p of an input gradient above u_min, unless it overflows."""

    needs = Needs.STATISTICS
    n_uf_threshold: float = 1e-3

    def __post_init__(self) -> None:
        p = self.n_uf_threshold
        if not 0.0 < number("n_uf_threshold", p) < 1.0:
            raise ValueError(
                f"n_uf_threshold={p!r} is a share of elements and must lie strictly between 0 and 1; "
                "0.001 is usual"
            )

    def scale(
        self, g: ArrayStatistics, W: Optional[ArrayStatistics], *, range: Range, fan_in: float
    ) -> float:
        """Compute the scale from statistics; without `W`, `fan_in` is not used."""
        # Deviation of the input gradient, as published: without a weight that of g, else that of a sum of K
        # products, half of which a ReLU makes 0.
        sigma = g.std if W is None else math.sqrt(g.mean_square) * math.sqrt(W.mean_square * fan_in * 0.5)
        if sigma == 0.0:
            return 1.0  # all products are 0, or without a weight all elements equal
        # Only overflow may need a scale below 1. Of a NaN, as an infinite mean square of g times 0, `max`
        # returns its first argument, 1.
        scale = max(1.0, self.sigma_min(range) / sigma)
        return clamp_scale(min(scale, overflow_limit(g, W, fan_in, range.u_max)))

    def sigma_min(self, range: Range) -> float:
        """Standard deviation at which a share p of a centred normal distribution lies below u_min."""
        return range.u_min / (math.sqrt(2.0) * erfinv(self.n_uf_threshold))


@dataclass(frozen=True)
class LognormalRange(ApproxRange):
    """Scale that keeps all but a share p of a gradient above u_min, for functions without a weight."""

    needs = Needs.ARRAYS

    def scale(self, g: Any, W: Any, *, range: Range, fan_in: float) -> float:
        """Compute the scale from the logarithms of the elements."""
        magnitudes = np.abs(np.asarray(g))
        finite = magnitudes[np.isfinite(magnitudes)]
        # float32 moments, as published; float64 elements beyond float32 become its largest number.
        in_float32 = np.minimum(finite, FLOAT32.max).astype(np.float32)
        logarithms = np.log(in_float32[in_float32 > 0])
        deviation = float(logarithms.std()) if logarithms.size else 0.0
        if deviation == 0.0:
            return 1.0  # equal magnitudes, or zeros alone, follow no such distribution
        # A share p of the logarithms lies below this point, which the scale brings to u_min.
        lowest = float(logarithms.mean()) + deviation * NormalDist().inv_cdf(self.n_uf_threshold)
        exponent = math.log(range.u_min) - lowest
        limit = range.u_max / float(finite.max())
        # `exp` raises beyond 709, where scales are far above `limit`. Only overflow may need a scale below 1.
        return clamp_scale(min(max(math.exp(min(exponent, 709.0)), 1.0), limit))


def erfinv(y: float) -> float:
    """Inverse of erf for -1 < y < 1, to a relative error of 1e-14, except for 1 - y < 1e-9."""
    # Importing SciPy takes 20 MB and 0.2 s. If 1 + y rounds to 2, inv_cdf(1.0) would raise.
    below = min(0.5 * (1.0 + y), math.nextafter(1.0, 0.0))
    x = NormalDist().inv_cdf(below) / math.sqrt(2.0)
    # 1 + y has lost digits of a small y; a step of Newton's method restores them.
    return x - (math.erf(x) - y) * (0.5 * math.sqrt(math.pi) * math.exp(x * x))
