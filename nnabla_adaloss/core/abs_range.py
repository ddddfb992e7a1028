# SPDX-License-Identifier: Apache-2.0
"""Loss scale from the extreme magnitudes of the gradient and of the weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

import numpy as np
from numpy.typing import NDArray

from .bounds import overflow_limit
from .power_of_two import clamp_scale
from .statistics import ArrayStatistics, statistics_of
from .validation import positive_number

if TYPE_CHECKING:
    from .config import AdaLossConfig

# Products below this are not chased: two tiny elements that never meet would ask for an enormous scale.
_SMALLEST_PRODUCT = 1e-15


def abs_range(
    g: ArrayStatistics, W: Optional[ArrayStatistics], *, config: AdaLossConfig, fan_in: float
) -> float:
    """`get_loss_scale_by_abs_range` from statistics alone; without `W`, `fan_in` is not looked at."""
    if g.nonfinite or g.abs_max == 0.0:
        return 1.0
    if W is None:
        weight_min = fan_in = 1.0
    elif W.nonfinite or W.abs_max == 0.0:
        return 1.0
    else:
        weight_min = W.abs_min
    u_min, u_max = config.range
    lower = u_min / fan_in / max(g.abs_min * weight_min, _SMALLEST_PRODUCT)
    return clamp_scale(min(max(lower, 1.0), overflow_limit(g, W, fan_in, u_max)))


def get_loss_scale_by_abs_range(
    g: NDArray[Any],
    W: Optional[NDArray[Any]] = None,
    *,
    config: AdaLossConfig,
    fan_in: Optional[float] = None,
) -> NDArray[np.float64]:
    """The scale that lifts the smallest possible non-zero sum of products to u_min, within overflow.

    Over the non-zero elements: min(max((u_min / K) / max(min|g| min|W|, 1e-15), 1), (u_max / K) / (max|g|
    max|W|)).

    Args:
        g: gradient of the layer's output, any shape, float16, float32 or float64.
        W: the layer's weight, any shape; None for a function without weight, where K is 1.
        config: gives u_min and u_max.
        fan_in: K, number of products summed into one element of the input gradient; None looks at single
            products.

    Returns:
        0-dim float64 array, positive and finite; 1 when `g` or `W` is all zero, empty, or holds an infinity
        or NaN.

    Raises:
        ValueError: `fan_in` is not positive and finite.

    Example:
        >>> import numpy as np
        >>> from nnabla_adaloss.core import AdaLossConfig
        >>> g, W = np.array([[1e-7, 1e-3]]), np.array([[0.1, 0.5], [0.2, 0.3]])
        >>> round(float(get_loss_scale_by_abs_range(g, W, config=AdaLossConfig(), fan_in=2)), 3)
        3.0
    """
    terms = 1.0 if fan_in is None else positive_number("fan_in", fan_in)
    weight = None if W is None else statistics_of(W)
    return np.array(abs_range(statistics_of(g), weight, config=config, fan_in=terms))
