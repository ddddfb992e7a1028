# SPDX-License-Identifier: Apache-2.0
"""The scale of a layer that leads from one component of the gradients to another.

alpha = scale of the component of the input gradient / S      as measured, when that is known
alpha = overflow limit / 2**6                                 before, which the first measurement replaces
alpha = min(alpha, what keeps alpha * W in range, but no less than 1)
"""

from __future__ import annotations

import math
from typing import Optional, Tuple

from .layer_record import Reason
from .layer_scale import Constraints
from .overflow import overflow_limit
from .power_of_two import clamp_scale, floor_power_of_two
from .statistics import ArrayStatistics

# The overflow limit is proven, but what sums up behind a layer, such as a weight gradient, can be larger.
_BELOW_THE_LIMIT = 2.0**-6


def component_alpha(
    previous_scale: float,
    wanted: Optional[float],
    g: ArrayStatistics,
    weight: Optional[ArrayStatistics],
    fan_in_bound: float,
    u_max: float,
    constraints: Constraints,
) -> Tuple[float, Reason]:
    """What the layer's input gradient is multiplied by, and what held it there.

    Args:
        previous_scale: S, the scale of the arriving gradient.
        wanted: the scale of the input gradient's component; None while nothing is known of it.
        g: statistics of the output gradient, S included; of no element where it is not known. Only looked at
            where `wanted` is None.
        weight: statistics of the weight; None: not looked at.
        fan_in_bound: the largest number of products summed into one element.
        u_max: largest magnitude of the storage format.
        constraints: `weight_max` is respected.

    Returns:
        A power of two, if the given scales are.
    """
    if wanted is not None:
        alpha, reason = wanted / previous_scale, Reason.METHOD
    elif g.nonfinite or (weight is not None and weight.nonfinite):
        alpha, reason = 1.0, Reason.NONFINITE
    else:
        limit = overflow_limit(g, weight, fan_in_bound, u_max)
        alpha = 1.0 if math.isinf(limit) else floor_power_of_two(clamp_scale(limit * _BELOW_THE_LIMIT))
        reason = Reason.OVERFLOW_GUARD
    if weight is not None and alpha > 1.0 and alpha * weight.abs_max > constraints.weight_max:
        alpha = max(floor_power_of_two(constraints.weight_max / weight.abs_max), 1.0)
        reason = Reason.WEIGHT_RANGE
    return alpha, reason
