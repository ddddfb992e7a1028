# SPDX-License-Identifier: Apache-2.0
"""The published functions: each step from a gradient and a weight to a loss scale, on NumPy arrays."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Optional, Tuple, Union

import numpy as np
from numpy.typing import NDArray

from ..core import methods
from ..core.config import AdaLossConfig
from ..core.layer_alpha import bound_alpha
from ..core.power_of_two import clamp_scale
from ..core.statistics import ArrayStatistics, statistics_of
from ..core.validation import array_of_numbers, boolean, instance, positive_number, scalar
from .ada_loss import AdaLoss


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
        g: gradient of the layer's output, any shape, float16, float32 or float64; computed in float64.
        W: the layer's weight with its output channels first, (C_out, C_in) or (C_out, C_in, k...): transpose
            that of nnabla's affine. None for a function without weight, e.g. a cast: then sigma = std(g),
            and only max|g| must not overflow.
        config: gives p (`n_uf_threshold`), u_min and u_max.
        fan_in: K, number of products summed into one element of the input gradient. None: sigma takes K from
            the shape of `W` (C_out, or C_out * k...), and the overflow limit has K = 1.
        lognormal: only without `W`: assume that |g| is lognormally distributed. With m and s the mean and
            deviation of ln|g| over the non-zero elements, exp(ln u_min - m - s sqrt(2) erfinv(2p - 1))
            replaces the first value of the minimum.

    Returns:
        0-dim float64 array, positive and finite; 1 when `g` or `W` holds an infinity or NaN, or only zeros,
        and where sigma (or s) is 0, whatever their size, as of a constant `g` without `W`.

    Raises:
        ValueError: `lognormal` together with `W`, or `fan_in` not positive and finite.

    Example:
        >>> import numpy as np
        >>> from nnabla_adaloss import AdaLossConfig, get_loss_scale_by_approx_range
        >>> g, W = np.array([[1e-7, -1e-7]]), np.array([[0.1, -0.1], [0.1, 0.1]])
        >>> round(float(get_loss_scale_by_approx_range(g, W, config=AdaLossConfig(), fan_in=2)))
        4787
    """
    instance("config", config, AdaLossConfig)
    if boolean("lognormal", lognormal) and W is not None:
        raise ValueError("lognormal=True is defined without a weight only; pass W=None or lognormal=False")
    method = (methods.LognormalRange if lognormal else methods.ApproxRange)(config.n_uf_threshold)
    if W is None or fan_in is not None:
        return _scale_by(method, g, W, config, fan_in)
    g, W, of_g, of_w = _with_statistics(g, W)
    if of_w is None or of_g.nonfinite or of_w.nonfinite:
        return np.array(1.0)
    # As published, K from the shape of W counts for sigma only.
    K = W.shape[0] * math.prod(W.shape[2:]) if W.ndim else 1
    unlimited = method.scale(of_g, of_w, range=config.range._replace(u_max=math.inf), fan_in=K)
    return np.array(clamp_scale(min(unlimited, methods.overflow_limit(of_g, of_w, 1.0, config.range.u_max))))


def get_loss_scale_by_abs_range(
    g: NDArray[Any],
    W: Optional[NDArray[Any]] = None,
    *,
    config: AdaLossConfig,
    fan_in: Optional[float] = None,
) -> NDArray[np.float64]:
    """The scale that lifts the smallest possible non-zero sum of products to u_min, within overflow.

    Over the non-zero elements: min(max((u_min / K) / max(min|g| min|W|, 1e-15), 1), (u_max / K) / (max|g|
    max|W|)). Without `W`, K is 1. Arguments, result and errors are as in `get_loss_scale_by_approx_range`,
    except that `W` may have any shape, and that without `fan_in` K is 1.

    Example:
        >>> import numpy as np
        >>> from nnabla_adaloss import AdaLossConfig, get_loss_scale_by_abs_range
        >>> g, W = np.array([[1e-7, 1e-3]]), np.array([[0.1, 0.5], [0.2, 0.3]])
        >>> round(float(get_loss_scale_by_abs_range(g, W, config=AdaLossConfig(), fan_in=2)), 3)
        3.0
    """
    return _scale_by(methods.AbsRange(), g, W, config, fan_in)


def get_loss_scale_by_element_wise_range(
    g: NDArray[Any],
    W: Optional[NDArray[Any]] = None,
    *,
    config: AdaLossConfig,
    fan_in: Optional[float] = None,
) -> NDArray[np.float64]:
    """The scale that lifts every product of the backward pass to u_min, within overflow.

    With p_i the non-zero products |g[n, c] W[c, m]|: min(max_i max(u_min / p_i, 1), min_i (u_max / p_i) / K).
    With `config.max_rescue_ratio` q the maximum is over the int(n q) largest of the n products, but at least
    one. Without `W`, p_i = |g_i|, and K is 1. Arguments, result and errors are as in
    `get_loss_scale_by_approx_range`, except that without `fan_in` K is 1, and that `g`, (N, C) or (N, C,
    ...), and `W`, (C, M) or (C, ...), must share their channels.

    Example:
        >>> import numpy as np
        >>> from nnabla_adaloss import AdaLossConfig, get_loss_scale_by_element_wise_range
        >>> g, W = np.array([[1e-7, 1e-3]]), np.array([[0.1, 0.5], [0.2, 0.3]])
        >>> round(float(get_loss_scale_by_element_wise_range(g, W, config=AdaLossConfig(), fan_in=2)), 3)
        6.0
    """
    method = methods.ElementWiseRange(instance("config", config, AdaLossConfig).max_rescue_ratio)
    return _scale_by(method, g, W, config, fan_in)


def _scale_by(
    method: methods.Method, g: Any, W: Any, config: AdaLossConfig, fan_in: Optional[float]
) -> NDArray[np.float64]:
    terms = 1.0 if fan_in is None else positive_number("fan_in", fan_in)
    instance("config", config, AdaLossConfig)
    g, W, of_g, of_w = _with_statistics(g, W)
    if of_g.nonfinite or (of_w is not None and of_w.nonfinite):
        return np.array(1.0)
    inputs = (g, W) if method.needs is methods.Needs.ARRAYS else (of_g, of_w)
    return np.array(method.scale(*inputs, range=config.range, fan_in=terms))


def _with_statistics(g: Any, W: Any) -> Tuple[Any, Any, ArrayStatistics, Optional[ArrayStatistics]]:
    """Convert gradient and weight to arrays, and compute their statistics."""
    g, W = array_of_numbers("g", g), None if W is None else array_of_numbers("W", W)
    return g, W, statistics_of(g), None if W is None else statistics_of(W)


def bound_loss_scale_by_heuristics(
    scale: Union[float, NDArray[Any]], *, config: AdaLossConfig, prev_scale: float = 1.0
) -> NDArray[np.float64]:
    """Bound a layer's scale by `scale_upper_bound`, and its accumulated scale by `accum_upper_bound`.

    min(scale, scale_upper_bound, accum_upper_bound / prev_scale), except that a bound never turns a scale of
    1 or more into one below 1. A scale below 1 was demanded by overflow and stays.

    Args:
        scale: the layer's scale, positive.
        config: holds the two bounds.
        prev_scale: S, the accumulated scale of the arriving gradient.

    Returns:
        0-dim float64 array.

    Raises:
        ValueError: a scale is not positive and finite.

    Example:
        >>> from nnabla_adaloss import AdaLossConfig, bound_loss_scale_by_heuristics
        >>> float(bound_loss_scale_by_heuristics(100.0, config=AdaLossConfig(), prev_scale=128.0))
        8.0
    """
    instance("config", config, AdaLossConfig)
    checked = positive_number("scale", scalar(scale))
    previous_scale = positive_number("prev_scale", prev_scale)
    return np.array(bound_alpha(checked, previous_scale, replace(config, use_bound=True))[0])


def get_loss_scale(
    g: NDArray[Any],
    W: Optional[NDArray[Any]],
    *,
    config: AdaLossConfig,
    fan_in: float,
    prev_scale: float = 1.0,
) -> NDArray[np.float64]:
    """Scale that multiplies a layer's input gradient.

    `config.loss_scale_method`, then `bound_loss_scale_by_heuristics` (if `use_bound`), then the overflow
    guard (u_max / K) / (max|g| max|W|), which holds for every method, then `get_power_of_two_scale` (if
    `power_of_two`).
    Source: Zhao et al. 2019 (arXiv 1910.12385), section 3.3, and `get_loss_scale` in the authors' Chainer
    implementation.

    Args:
        g: gradient of the layer's output, carrying `prev_scale`; any shape, float16, float32 or float64.
        W: the layer's weight; None for a function without weight, where `fan_in` is not used.
        config: method, range, bounds.
        fan_in: K, number of products summed into one element of the input gradient.
        prev_scale: S, the accumulated scale of `g`.

    Returns:
        0-dim float64 array, positive and finite; 1 when `g` or `W` holds an infinity or a NaN.

    Raises:
        ValueError: `fan_in` or `prev_scale` is not positive and finite, or a user-defined method returned
            such a scale.

    Example:
        >>> import numpy as np
        >>> from nnabla_adaloss import AdaLossConfig, get_loss_scale
        >>> g, W = np.array([[1e-7, -1e-7]]), np.array([[0.1, -0.1], [0.1, 0.1]])
        >>> float(get_loss_scale(g, W, config=AdaLossConfig(), fan_in=2, prev_scale=128.0))
        8.0
    """
    instance("config", config, AdaLossConfig)
    g, W, of_g, of_w = _with_statistics(g, W)
    alpha = AdaLoss(config).loss_scale(
        "",
        g,
        W,
        fan_in=positive_number("fan_in", fan_in),
        previous_scale=positive_number("prev_scale", prev_scale),
        iteration=0,
        g_statistics=of_g,
        weight_statistics=of_w,
    )
    return np.array(alpha)
