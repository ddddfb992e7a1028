# SPDX-License-Identifier: Apache-2.0
"""Upper bounds of a layer's loss scale: two that prudence suggests, one that overflow demands."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Optional, Union

import numpy as np
from numpy.typing import NDArray

from .statistics import ArrayStatistics
from .validation import positive_number

if TYPE_CHECKING:
    from .config import AdaLossConfig


def bound_scale(scale: float, config: AdaLossConfig, prev_scale: float) -> float:
    """`bound_loss_scale_by_heuristics` on plain floats, unchecked."""
    if scale <= 1.0:
        return scale
    # Comparisons instead of min and max, which are several times slower: this runs per layer and iteration.
    upper = config.accum_upper_bound / prev_scale
    if upper > config.scale_upper_bound:
        upper = config.scale_upper_bound
    if upper < 1.0:
        upper = 1.0
    return scale if scale < upper else upper


def bound_loss_scale_by_heuristics(
    scale: Union[float, NDArray[Any]], *, config: AdaLossConfig, prev_scale: float = 1.0
) -> NDArray[np.float64]:
    """A layer's scale under `scale_upper_bound`, and under `accum_upper_bound` together with the scales
    before it.

    min(scale, scale_upper_bound, accum_upper_bound / prev_scale), except that a bound never turns a scale of
    1 or more into one below 1: that would create the underflow which scaling is there to prevent. A scale
    below 1 was demanded by overflow and stays.

    Args:
        scale: the layer's scale, positive.
        config: holds the two bounds.
        prev_scale: S, the accumulated scale of the arriving gradient.

    Returns:
        0-dim float64 array.

    Raises:
        ValueError: a scale is not positive and finite.

    Example:
        >>> from nnabla_adaloss.core import AdaLossConfig
        >>> float(bound_loss_scale_by_heuristics(100.0, config=AdaLossConfig(), prev_scale=128.0))
        8.0
    """
    checked = positive_number("scale", float(scale))
    return np.array(bound_scale(checked, config, positive_number("prev_scale", prev_scale)))


def overflow_limit(g: ArrayStatistics, W: Optional[ArrayStatistics], fan_in: float, u_max: float) -> float:
    """Largest scale under which no element of the input gradient can exceed `u_max`.

    (u_max / K) / (max|g| * max|W|): K products, none larger than the product of the two maxima. Infinite when
    the gradient or the weight is all zero. Without a weight it is u_max / max|g|, and `fan_in` is not looked
    at.
    """
    largest = g.abs_max if W is None else g.abs_max * W.abs_max * fan_in
    return u_max / largest if largest else math.inf
