# SPDX-License-Identifier: Apache-2.0
"""The scale at which the branches of one gradient are added."""

from __future__ import annotations

import math
from typing import Sequence, Tuple


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
