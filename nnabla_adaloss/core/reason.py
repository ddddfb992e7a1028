# SPDX-License-Identifier: Apache-2.0
"""What held a layer's loss scale where it is."""

from __future__ import annotations

from enum import Enum


class Reason(str, Enum):
    """Why a layer's scale is what it is: the last of these, in this order, that decided about it."""

    METHOD = "method"
    """`loss_scale_method` asked for it (rounded down to a power of two)."""

    SCALE_BOUND = "scale bound"
    """`scale_upper_bound`."""

    ACCUMULATED_BOUND = "accumulated bound"
    """`accum_upper_bound`, over the product of the scales from the loss to the layer."""

    OVERFLOW_GUARD = "overflow guard"
    """A larger one could have made the input gradient overflow."""

    LAYER_LIMIT = "layer limit"
    """The layer's scale had overflowed before, and was lowered."""

    WEIGHT_RANGE = "weight range"
    """A larger one would have made the scaled copy of the weight overflow."""

    BRANCHES = "meeting of branches"
    """Another function's contribution to the same gradient carries this scale already."""

    NONFINITE = "non-finite"
    """The gradient or the weight holds an infinity or a NaN: no scale would help."""

    HELD = "held"
    """It was chosen some iterations ago, and would be chosen again, or is not measured anew yet."""
