# SPDX-License-Identifier: Apache-2.0
"""Loss scale of one layer in one pass, and its reason."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, Optional

from .statistics import ArrayStatistics


class Reason(str, Enum):
    """Reason of a layer's scale: the last of these, in this order, that changed it.

    Attributes:
        METHOD: result of `loss_scale_method` (rounded down to a power of two).
        SCALE_BOUND: `scale_upper_bound`.
        ACCUMULATED_BOUND: `accum_upper_bound`, over the product of the scales from the loss to the layer.
        OVERFLOW_GUARD: a larger one could have made the input gradient overflow.
        SCALE_LIMIT: it brings the gradients after the layer to their scale limit.
        EQUALIZED: the gradients before and after the layer have nearly equal limits, and take the smaller.
        WEIGHT_RANGE: a larger one would have made the scaled copy of the weight overflow.
        BRANCHES: another function's contribution to the same gradient carries this scale already, or the
            gradients around the layer share a scale because only hooks could split them.
        NONFINITE: the gradient or the weight holds an infinity or a NaN: no scale would help.
        UNKNOWN: no measurement for the method yet.
        HELD: it was chosen in an earlier iteration, without new measurements since.
    """

    METHOD = "method"
    SCALE_BOUND = "scale bound"
    ACCUMULATED_BOUND = "accumulated bound"
    OVERFLOW_GUARD = "overflow guard"
    SCALE_LIMIT = "scale limit"
    EQUALIZED = "equalized"
    WEIGHT_RANGE = "weight range"
    BRANCHES = "meeting of branches"
    NONFINITE = "non-finite"
    UNKNOWN = "unknown"
    HELD = "held"


class LayerRecord(NamedTuple):
    """Decision about one layer: `LayerScaled.record`.

    Attributes:
        iteration: iteration the scale is applied in.
        layer: name of the layer.
        alpha: the scale that is applied to the layer's input gradient.
        unbounded: the method's result before bounds, limits and rounding; 1 if g or W is not finite.
        previous_scale: S, the accumulated scale of the arriving output gradient.
        accumulated_scale: S * alpha, the scale that the input gradient carries.
        fan_in: K, number of products summed into one element of the input gradient.
        g: statistics of the output gradient, S included; None if the method needs none.
        weight: statistics of the weight; None without a weight, or if the method needs none.
        reason: the reason of alpha.
        attempt: number of the backward pass within its iteration, from 0, over retries and micro-batches
            (`accum_grad`). Each wrapped graph counts by itself; 0 for functions that scale without an engine.
        loss_weight: factor of the loss on the way to the layer, which S compensates.
    """

    iteration: int
    layer: str
    alpha: float
    unbounded: float
    previous_scale: float
    accumulated_scale: float
    fan_in: float
    g: Optional[ArrayStatistics]
    weight: Optional[ArrayStatistics]
    reason: Reason = Reason.METHOD
    attempt: int = 0
    loss_weight: float = 1.0
