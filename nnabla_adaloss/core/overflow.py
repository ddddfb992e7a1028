# SPDX-License-Identifier: Apache-2.0
"""What a layer's scale may be at most, for its input gradient not to overflow."""

from __future__ import annotations

import math
from typing import Optional

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
