# SPDX-License-Identifier: Apache-2.0
"""Alpha of a layer from a method: from a history if needed, checked, and bounded."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, Tuple

import numpy as np

from .config import AdaLossConfig
from .layer_record import Reason
from .methods import Range
from .power_of_two import floor_power_of_two
from .statistics import ArrayStatistics

History = Tuple[Tuple[int, ArrayStatistics], ...]
"""Statistics of a layer's gradient by iteration, newest last, divided by its scale."""


def with_newest(history: History, iteration: int, g: ArrayStatistics, config: AdaLossConfig) -> History:
    """Add `g`, divided by its scale, to a history, replacing one of the same iteration; cut to the window."""
    older = history[:-1] if history and history[-1][0] == iteration else history
    return (*older, (iteration, g))[-(config.method.window or 1) :]


def scaled_history(history: History, scale: float) -> Tuple[ArrayStatistics, ...]:
    """Gradients of a history, multiplied by `scale`."""
    return tuple(g.scaled(scale) for _, g in history)


def unbounded_alpha(config: AdaLossConfig, layer: str, g: Any, W: Any, range: Range, fan_in: float) -> float:
    """Compute a layer's alpha by the method of a configuration, before it is `bounded`; `g` and `W`: inputs
    of the method. ValueError unless its result is a positive finite number.
    """
    result: Any = config.method.scale(g, W, range=range, fan_in=fan_in)
    alpha = result.item() if isinstance(result, np.ndarray) and result.size == 1 else result
    if not (isinstance(alpha, Real) and 0.0 < float(alpha) < math.inf):
        raise ValueError(
            f"loss_scale_method={config.loss_scale_method!r} returned {result!r} for the finite gradient of "
            f"layer {layer}; a scale must be a positive finite number"
        )
    return float(alpha)


def bounded(alpha: float, previous_scale: float, config: AdaLossConfig) -> Tuple[float, Reason]:
    """Bound alpha from above, but not to less than 1, if the configuration uses bounds."""
    if not config.use_bound or alpha <= 1.0:
        return alpha, Reason.METHOD
    # Comparisons instead of min and max, which are several times slower: this runs per layer and iteration.
    upper, reason = config.accum_upper_bound / previous_scale, Reason.ACCUMULATED_BOUND
    if upper > config.scale_upper_bound:
        upper, reason = config.scale_upper_bound, Reason.SCALE_BOUND
    if upper < 1.0:
        upper = 1.0
    return (alpha, Reason.METHOD) if alpha < upper else (upper, reason)


def largest_alpha(weight_amax: float, u_max: float) -> float:
    """Largest power of two that keeps the scaled copy of a weight within `u_max`, but at least 1."""
    return max(floor_power_of_two(u_max / weight_amax), 1.0)
