# SPDX-License-Identifier: Apache-2.0
"""Loss scale from means, deviations and maxima, taking gradients and weights for normally distributed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Optional

import numpy as np
from numpy.typing import NDArray
from scipy.special import erfinv

from .bounds import overflow_limit
from .formats import FLOAT32
from .power_of_two import clamp_scale
from .statistics import ArrayStatistics, statistics_of
from .validation import positive_number

if TYPE_CHECKING:
    from .config import AdaLossConfig


def approx_range(
    g: ArrayStatistics, W: Optional[ArrayStatistics], *, config: AdaLossConfig, fan_in: float
) -> float:
    """`get_loss_scale_by_approx_range` from statistics alone; without `W`, `fan_in` is not looked at."""
    if g.nonfinite or (W is not None and W.nonfinite):
        return 1.0
    sigma = g.std if W is None else product_sigma(g, W, fan_in)
    return _scale(sigma, overflow_limit(g, W, fan_in, config.range[1]), config)


def product_sigma(g: ArrayStatistics, W: ArrayStatistics, fan_in: float) -> float:
    """sqrt(M(g) * M(W)) * sqrt(K / 2), the modelled deviation of an element of the input gradient.

    For finite arrays, where M(X), `mean_square`, is sum_of_squares / count.
    """
    if not (g.count and W.count):
        return 0.0
    return math.sqrt(g.sum_of_squares / g.count) * math.sqrt(W.sum_of_squares / W.count * fan_in * 0.5)


def _scale(sigma: float, limit: float, config: AdaLossConfig) -> float:
    if sigma == 0.0:
        return 1.0
    scale = config.sigma_min / sigma
    if scale < 1.0:
        scale = 1.0
    return clamp_scale(scale if scale < limit else limit)


def get_loss_scale_by_approx_range(
    g: NDArray[Any],
    W: Optional[NDArray[Any]] = None,
    *,
    config: AdaLossConfig,
    fan_in: Optional[float] = None,
    lognormal: bool = False,
) -> NDArray[np.float64]:
    """The smallest scale that keeps all but a share p of the input gradient above u_min, within overflow.

    With M(X) = std(X)^2 + mean(X)^2 and sigma = sqrt(M(g) M(W)) sqrt(K / 2):
    min(max(u_min / (sqrt(2) erfinv(p) sigma), 1), (u_max / K) / (max|g| max|W|)); 1 when sigma is 0.
    Source: Zhao et al. 2019 (arXiv 1910.12385), section 3.3.

    Args:
        g: gradient of the layer's output, any shape, float16, float32 or float64. Everything is computed in
            float64.
        W: the layer's weight, (C, M) or (C_out, C_in, k...). None for a function without weight, e.g. a cast:
            then sigma = std(g), and max|g| alone must not overflow.
        config: gives p (`n_uf_threshold`), u_min and u_max.
        fan_in: K, number of products summed into one element of the input gradient. None: sigma takes K from
            the shape of `W` (C, or C_out * k...), and the overflow limit looks at single products.
        lognormal: only without `W`: take |g| for lognormally distributed. With m and s the mean and deviation
            of ln|g| over the non-zero elements, the lower value is exp(ln u_min - m - s sqrt(2) erfinv(2p -
            1)).

    Returns:
        0-dim float64 array, positive and finite; 1 when `g` or `W` holds an infinity or a NaN (the update is
        to be skipped; a scale would not help) or nothing but zeros.

    Raises:
        ValueError: `lognormal` together with `W`, or `fan_in` not positive and finite.

    Example:
        >>> import numpy as np
        >>> from nnabla_adaloss.core import AdaLossConfig
        >>> g, W = np.array([[1e-7, -1e-7]]), np.array([[0.1, -0.1], [0.1, 0.1]])
        >>> round(float(get_loss_scale_by_approx_range(g, W, config=AdaLossConfig(), fan_in=2)))
        4787
    """
    u_max = config.range[1]
    if fan_in is not None:
        fan_in = positive_number("fan_in", fan_in)
    statistics = statistics_of(g)
    if W is None:
        if statistics.nonfinite:
            return np.array(1.0)
        limit = overflow_limit(statistics, None, 1.0, u_max)
        if lognormal:
            return np.array(_lognormal_scale(g, limit, config))
        # The two-pass deviation, which keeps its digits when the mean is large.
        with np.errstate(all="ignore"):
            sigma = float(np.std(g, dtype=np.float64)) if statistics.count else 0.0
        return np.array(_scale(sigma, limit, config))
    if lognormal:
        raise ValueError("lognormal=True is defined without a weight only; pass W=None or lognormal=False")
    weight = statistics_of(W)
    if fan_in is not None:
        return np.array(approx_range(statistics, weight, config=config, fan_in=fan_in))
    if statistics.nonfinite or weight.nonfinite:
        return np.array(1.0)
    products = W.shape[0] * math.prod(W.shape[2:]) if W.ndim else 1
    limit = overflow_limit(statistics, weight, 1.0, u_max)
    return np.array(_scale(product_sigma(statistics, weight, products), limit, config))


def _lognormal_scale(g: NDArray[Any], limit: float, config: AdaLossConfig) -> float:
    # float32 moments, as published; a float64 element beyond float32 counts as its largest number.
    magnitudes = np.minimum(np.abs(np.asarray(g)), FLOAT32.max).astype(np.float32)
    logarithms = np.log(magnitudes[magnitudes > 0])
    deviation = float(logarithms.std()) if logarithms.size else 0.0
    if deviation == 0.0:
        return 1.0
    quantile = math.sqrt(2.0) * float(erfinv(2.0 * config.n_uf_threshold - 1.0))
    exponent = math.log(config.range[0]) - float(logarithms.mean()) - deviation * quantile
    # exp overflows beyond 709; the limit decides long before.
    return clamp_scale(min(max(math.exp(min(exponent, 709.0)), 1.0), limit))
