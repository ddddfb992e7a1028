# SPDX-License-Identifier: Apache-2.0
"""Scales at which nothing overflows: of a layer's input gradient, and where branches meet."""

from __future__ import annotations

import math
from typing import Optional, Sequence, Tuple

from .statistics import ArrayStatistics


def overflow_limit(g: ArrayStatistics, W: Optional[ArrayStatistics], fan_in: float, u_max: float) -> float:
    """Largest scale under which no element of the input gradient can exceed `u_max`.

    (u_max / K) / (max|g| * max|W|): K products, none larger than the product of the two maxima. Infinite when
    the gradient or the weight is all zero. Without a weight it is u_max / max|g|, and `fan_in` is not looked
    at.

    Example:
        >>> import numpy as np
        >>> from nnabla_adaloss.core import statistics_of
        >>> overflow_limit(statistics_of(np.array([8.0, -2.0])), None, 1.0, u_max=64.0)
        8.0
    """
    largest = g.abs_max if W is None else g.abs_max * W.abs_max * fan_in
    return u_max / largest if largest else math.inf


def common_scale(branches: Sequence[Tuple[float, float]], *, u_max: float) -> float:
    """The largest of the branches' scales at which their sum cannot overflow.

    Where a variable feeds several functions, its gradient is the sum of their contributions, which must carry
    one scale when they are added. A large one keeps small contributions; too large a one overflows.

    Args:
        branches: per contribution its scale and its max|g| as stored, that is with the scale.
        u_max: largest magnitude that the sum may reach.

    Returns:
        The largest given scale s with sum_i max|g_i| * (s / scale_i) <= u_max; the smallest given scale when
        none fits. A branch whose max|g| is not finite has no say: whatever the scale, its update is skipped.

    Raises:
        ValueError: there is no branch.

    Example:
        >>> common_scale([(8.0, 100.0), (1024.0, 3.0)], u_max=65504.0)
        1024.0
        >>> common_scale([(8.0, 1000.0), (1024.0, 3.0)], u_max=65504.0)
        8.0
    """
    if not branches:
        raise ValueError("branches is empty; a gradient is the sum of one contribution at least")
    scales = {scale for scale, _ in branches}
    smallest = min(scales)
    if len(scales) == 1:
        return smallest
    # A sum is in proportion to its scale, so it is formed once, at the smallest, where no term grew.
    total = sum(abs_max * (smallest / scale) for scale, abs_max in branches if math.isfinite(abs_max))
    return max((scale for scale in scales if total * (scale / smallest) <= u_max), default=smallest)
