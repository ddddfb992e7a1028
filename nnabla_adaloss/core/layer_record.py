# SPDX-License-Identifier: Apache-2.0
"""The loss scale of one layer in one pass, and the reason for it."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, Optional

from .statistics import ArrayStatistics


class Reason(str, Enum):
    """Why a layer's scale is what it is: the last of these, in this order, that decided about it.

    Attributes:
        METHOD: `loss_scale_method` asked for it (rounded down to a power of two).
        SCALE_BOUND: `scale_upper_bound`.
        ACCUMULATED_BOUND: `accum_upper_bound`, over the product of the scales from the loss to the layer.
        OVERFLOW_GUARD: a larger one could have made the input gradient overflow.
        SCALE_LIMIT: it brings the gradients behind the layer to the largest scale that they leave room for.
        EQUALIZED: the gradients before and behind the layer have nearly the same limit, and take the smaller.
        WEIGHT_RANGE: a larger one would have made the scaled copy of the weight overflow.
        BRANCHES: another function's contribution to the same gradient carries this scale already, or the
            gradients around the layer share a scale because only hooks could part them.
        NONFINITE: the gradient or the weight holds an infinity or a NaN: no scale would help.
        UNKNOWN: nothing was measured yet that the method could use.
        HELD: it was chosen in an earlier iteration and still holds: nothing was measured since, or the same.
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
    """One decision about one layer: `LayerScaled.record`.

    Attributes:
        iteration: iteration the scale is applied in.
        layer: name of the layer.
        alpha: the scale that is applied to the layer's input gradient.
        unbounded: what the method gave, before bounds, limits and power of two; 1 when the gradient or the
            weight is not finite.
        previous_scale: S, the accumulated scale of the arriving output gradient.
        accumulated_scale: S * alpha, the scale that the input gradient carries.
        fan_in: K, number of products summed into one element of the input gradient.
        g: statistics of the output gradient, S included; None when the method did not ask for them.
        weight: statistics of the weight; None where there is no weight or the method did not ask.
        reason: what decided about alpha.
        attempt: number of the backward pass within its iteration, from 0: retries of a batch count on, and so
            do micro-batches (`accum_grad`). Each wrapped graph counts by itself; functions that scale without
            an engine leave it 0.
        loss_weight: what the loss is multiplied by on the way to the layer, which S makes up for.
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
