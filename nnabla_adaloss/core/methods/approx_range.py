# SPDX-License-Identifier: Apache-2.0
"""Loss scale from means, deviations and maxima, taking gradients and weights for normally distributed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Optional

from ..overflow import overflow_limit
from ..power_of_two import clamp_scale
from ..statistics import ArrayStatistics
from ..validation import open_share
from .method import Method, Needs, Range

# The largest float below 1.
_BELOW_ONE = 1.0 - 2.0**-53


@dataclass(frozen=True)
class ApproxRange(Method):
    """The smallest scale that keeps all but a share p of the input gradient above u_min, within overflow.

    With M(X) = std(X)^2 + mean(X)^2 and sigma = sqrt(M(g) M(W)) sqrt(K / 2):
    min(max(u_min / (sqrt(2) erfinv(p) sigma), 1), (u_max / K) / (max|g| max|W|)); 1 when sigma is 0.
    Without a weight sigma is std(g), and max|g| alone must not overflow.
    Source: Zhao et al. 2019 (arXiv 1910.12385), section 3.3.

    Attributes:
        n_uf_threshold: p, accepted share of input gradient elements that underflow; between 0 and 1.

    Example:
        >>> import numpy as np
        >>> from nnabla_adaloss.core import statistics_of
        >>> g, W = statistics_of(np.array([1e-7, -1e-7])), statistics_of(np.array([0.1, -0.1]))
        >>> round(ApproxRange().scale(g, W, range=Range(6e-8, 65504.0), fan_in=2))
        4787
    """

    needs = Needs.STATISTICS
    n_uf_threshold: float = 1e-3

    def __post_init__(self) -> None:
        open_share("n_uf_threshold", self.n_uf_threshold, usual=1e-3)

    def scale(
        self, g: ArrayStatistics, W: Optional[ArrayStatistics], *, range: Range, fan_in: float
    ) -> float:
        """The scale from statistics; without `W`, `fan_in` is not looked at."""
        sigma = g.std if W is None else product_sigma(g, W, fan_in)
        if sigma == 0.0:
            return 1.0
        scale = range.u_min / self._quantile / sigma
        if scale < 1.0:
            scale = 1.0
        limit = overflow_limit(g, W, fan_in, range.u_max)
        return clamp_scale(scale if scale < limit else limit)

    def sigma_min(self, range: Range) -> float:
        """Standard deviation at which a share p of a centred normal distribution lies below u_min."""
        return range.u_min / self._quantile

    @cached_property
    def _quantile(self) -> float:
        return math.sqrt(2.0) * erfinv(self.n_uf_threshold)


def product_sigma(g: ArrayStatistics, W: ArrayStatistics, fan_in: float) -> float:
    """sqrt(M(g) * M(W)) * sqrt(K / 2), the modelled deviation of an element of the input gradient.

    For finite arrays, where M(X), `mean_square`, is sum_of_squares / count.
    """
    if not (g.count and W.count):
        return 0.0
    return math.sqrt(g.sum_of_squares / g.count) * math.sqrt(W.sum_of_squares / W.count * fan_in * 0.5)


def erfinv(y: float) -> float:
    """The x with erf(x) = y, to 1e-15 of it.

    From Python's own library: SciPy's takes 20 MB and 0.2 s to import.

    Args:
        y: between -1 and 1, both excluded.

    Raises:
        statistics.StatisticsError: `y` is not between them.

    Example:
        >>> import math
        >>> math.erf(erfinv(1e-3))
        0.001
    """
    below = 0.5 * (1.0 + y)
    if y < 1.0:
        # Next to one the sum is rounded to one.
        below = min(below, _BELOW_ONE)
    x = NormalDist().inv_cdf(below) / math.sqrt(2.0)
    # 1 + y has lost digits of a small y; a step of Newton's method finds them again.
    return x - (math.erf(x) - y) * (0.5 * math.sqrt(math.pi) * math.exp(x * x))
