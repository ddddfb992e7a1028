# SPDX-License-Identifier: Apache-2.0
"""What is reported about one layer's loss scale in one iteration."""

from __future__ import annotations

from typing import NamedTuple, Optional

from .reason import Reason
from .statistics import ArrayStatistics


class LayerRecord(NamedTuple):
    """One decision about one layer, handed to `AdaLossConfig.recorder`.

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
        reason: what held alpha where it is.
        attempt: number of the backward pass within its iteration, from 0: retries of a batch that was thrown
            away count on, and so do the micro-batches of a window (`accum_grad`). Each wrapped graph counts
            by itself; functions that scale without an engine leave it 0.
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
