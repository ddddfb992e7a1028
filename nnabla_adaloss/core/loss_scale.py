# SPDX-License-Identifier: Apache-2.0
"""A layer's loss scale from start to end: method, bounds, overflow guard, power of two."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Optional

import numpy as np
from numpy.typing import NDArray

from .bounds import bound_scale, overflow_limit
from .methods import resolve_method
from .power_of_two import clamp_scale, floor_power_of_two
from .statistics import statistics_of
from .validation import positive_number

if TYPE_CHECKING:
    from .config import AdaLossConfig


def applied_scale(unbounded: float, limit: float, config: AdaLossConfig, prev_scale: float) -> float:
    """What is applied of a method's scale: under the bounds and the overflow limit, as a power of two."""
    if unbounded == 1.0 <= limit:
        return 1.0
    scale = bound_scale(unbounded, config, prev_scale) if config.use_bound else unbounded
    if scale > limit:
        scale = clamp_scale(limit)
    return floor_power_of_two(scale) if config.power_of_two else scale


def checked_scale(scale: Any, method: Any) -> float:
    """A scale that a method returned, as a Python float; ValueError unless positive and finite."""
    result = float(scale)
    if not 0.0 < result < math.inf:
        raise ValueError(
            f"loss_scale_method={method!r} returned {scale!r} for a finite gradient; "
            "a scale must be positive and finite"
        )
    return result


def get_loss_scale(
    g: NDArray[Any],
    W: Optional[NDArray[Any]],
    *,
    config: AdaLossConfig,
    fan_in: float,
    prev_scale: float = 1.0,
) -> NDArray[np.float64]:
    """The scale a layer multiplies its input gradient by.

    `config.loss_scale_method`, then `bound_loss_scale_by_heuristics` (if `use_bound`), then the overflow
    guard (u_max / K) / (max|g| max|W|), which holds for every method, then `get_power_of_two_scale` (if
    `power_of_two`).

    Args:
        g: gradient of the layer's output, carrying `prev_scale`; float16, float32 or float64.
        W: the layer's weight; None for a function without weight, where `fan_in` is not looked at.
        config: method, range, bounds.
        fan_in: K, number of products summed into one element of the input gradient.
        prev_scale: S, the accumulated scale of `g`.

    Returns:
        0-dim float64 array, positive and finite; 1 when `g` or `W` holds an infinity or a NaN.

    Raises:
        ValueError: `fan_in` or `prev_scale` is not positive and finite, or a method of the user's own
            returned such a scale.

    Example:
        >>> import numpy as np
        >>> from nnabla_adaloss.core import AdaLossConfig
        >>> g, W = np.array([[1e-7, -1e-7]]), np.array([[0.1, -0.1], [0.1, 0.1]])
        >>> float(get_loss_scale(g, W, config=AdaLossConfig(), fan_in=2, prev_scale=128.0))
        8.0
    """
    fan_in = positive_number("fan_in", fan_in)
    prev_scale = positive_number("prev_scale", prev_scale)
    statistics, weight = statistics_of(g), None if W is None else statistics_of(W)
    if statistics.nonfinite or (weight is not None and weight.nonfinite):
        return np.array(1.0)
    method = resolve_method(config.loss_scale_method)
    inputs = (statistics, weight) if method.takes_statistics else (g, W)
    scale = checked_scale(method.function(*inputs, config=config, fan_in=fan_in), config.loss_scale_method)
    limit = overflow_limit(statistics, weight, fan_in, config.range[1])
    return np.array(applied_scale(scale, limit, config, prev_scale))
