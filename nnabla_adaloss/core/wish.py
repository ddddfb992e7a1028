# SPDX-License-Identifier: Apache-2.0
"""What a method wishes for a layer's input gradient, and the bounds of a configuration on that."""

from __future__ import annotations

import math
from typing import Any, Tuple

from .config import AdaLossConfig
from .layer_record import Reason
from .methods import Range


def asked(config: AdaLossConfig, g: Any, W: Any, range: Range, fan_in: float) -> float:
    """What the method of a configuration says; ValueError unless that is positive and finite."""
    found = config.method.scale(g, W, range=range, fan_in=fan_in)
    scale = float(found)
    if not 0.0 < scale < math.inf:
        raise ValueError(
            f"loss_scale_method={config.loss_scale_method!r} returned {found!r} for a finite gradient; "
            "a scale must be positive and finite"
        )
    return scale


def bounded(scale: float, previous_scale: float, config: AdaLossConfig) -> Tuple[float, Reason]:
    """A scale above 1 under `scale_upper_bound` and `accum_upper_bound`, which never turn it below 1."""
    # Comparisons instead of min and max, which are several times slower: this runs per layer and iteration.
    upper, reason = config.accum_upper_bound / previous_scale, Reason.ACCUMULATED_BOUND
    if upper > config.scale_upper_bound:
        upper, reason = config.scale_upper_bound, Reason.SCALE_BOUND
    if upper < 1.0:
        upper = 1.0
    return (scale, Reason.METHOD) if scale < upper else (upper, reason)
