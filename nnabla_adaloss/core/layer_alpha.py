# SPDX-License-Identifier: Apache-2.0
"""Alpha of a layer: from a method, checked and bounded, within the bounds that its weight sets."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, NamedTuple, Optional, Tuple

import numpy as np

from .config import AdaLossConfig
from .formats import Format
from .layer_record import Reason
from .methods import Range
from .power_of_two import floor_power_of_two
from .statistics import ArrayStatistics

# Shares of a format's exponents, for `_factor`.
_ENOUGH = 0.27  # amax of a copy that keeps its bits, in smallest normal numbers: 2**8 in float16
_SPARE = 0.4  # largest factor by which scales are lowered so that a copy keeps its bits: 2**12 in float16
_FURTHER = 0.27  # further factor if the copy would lose nearly all its bits: 2**8 in float16
_FEWEST_BITS = 4  # no scale is lowered for a copy that would keep fewer bits even then

History = Tuple[Tuple[int, ArrayStatistics], ...]
"""Statistics of a layer's gradient by iteration, newest last, divided by its scale and loss weight."""


def with_newest(history: History, iteration: int, g: ArrayStatistics, config: AdaLossConfig) -> History:
    """Add `g`, divided as a `History` is, or replace an entry of the same iteration; drop the oldest ones."""
    older = history[:-1] if history and history[-1][0] == iteration else history
    return (*older, (iteration, g))[-(config.method.window or 1) :]


def unbounded_alpha(config: AdaLossConfig, layer: str, g: Any, W: Any, range: Range, fan_in: float) -> float:
    """Compute an alpha by the method, before `bound_alpha`; ValueError unless it is positive and finite."""
    result: Any = config.method.scale(g, W, range=range, fan_in=fan_in)
    alpha = result.item() if isinstance(result, np.ndarray) and result.size == 1 else result
    if not (isinstance(alpha, Real) and 0.0 < float(alpha) < math.inf):
        raise ValueError(
            f"loss_scale_method={config.loss_scale_method!r} returned {result!r} for the finite gradient of "
            f"layer {layer}; a scale must be a positive finite number"
        )
    return float(alpha)


def bound_alpha(alpha: float, uncompensated: float, config: AdaLossConfig) -> Tuple[float, Reason]:
    """Limit alphas above 1 to the upper bounds; `uncompensated`: S without its factor for a small loss."""
    if not config.use_bound or alpha <= 1.0:
        return alpha, Reason.METHOD
    # Comparisons instead of min and max, which are several times slower: this runs per layer and iteration.
    upper, reason = config.accum_upper_bound / uncompensated, Reason.ACCUMULATED_BOUND
    if upper > config.scale_upper_bound:
        upper, reason = config.scale_upper_bound, Reason.SCALE_BOUND
    if upper < 1.0:
        upper = 1.0
    return (alpha, Reason.METHOD) if alpha <= upper else (upper, reason)


class AlphaBounds(NamedTuple):
    """Bounds of the alpha of layers with one weight: powers of two, so that equal choices compare equal."""

    highest: float  # the largest that keeps the scaled copy in range; at least 1, which makes no copy
    least_for_bits: float = 0.0  # the smallest that keeps nearly all bits of it
    least_for_few_bits: float = 0.0  # the smallest that keeps a few bits of its largest element
    beyond_floor: float = 1.0  # factor by which scales may fall below their floors for these few

    def intersection(self, other: AlphaBounds) -> AlphaBounds:
        """Bounds that satisfy both; `beyond_floor` is the larger one."""
        highest, *others = zip(self, other)
        return AlphaBounds(min(highest), *map(max, others))


def alpha_bounds(weight_amax: float, u_max: float, stored: Optional[Format]) -> AlphaBounds:
    """Bounds for a weight whose scaled copy may reach `u_max`; `stored`: the copy's format, None: float32."""
    highest = max(floor_power_of_two(u_max / weight_amax), 1.0)
    if stored is None:
        return AlphaBounds(highest)
    to_one = floor_power_of_two(1.0 / weight_amax)  # brings the copy's amax into (0.5, 1]
    # The copy's amax is 2**8 smallest normal numbers of float16: nearly all its elements are normal numbers.
    # An alpha of 1 is always enough: the weight itself has no more bits.
    for_bits = min(to_one * stored.smallest_normal * _factor(_ENOUGH, stored), 1.0)
    # The copy's amax is a subnormal number of four bits, or of all that a short mantissa has.
    for_few_bits = to_one * stored.smallest_subnormal * 2.0 ** min(_FEWEST_BITS, stored.mantissa_bits)
    return AlphaBounds(highest, for_bits, for_few_bits, _factor(_FURTHER, stored))


def spare_of(stored: Format) -> float:
    """Factor by which a scale may stay below its limit while gradients of this format keep their bits."""
    return _factor(_SPARE, stored)


def _factor(share: float, stored: Format) -> float:
    """Power of two that spans a share of the exponents of a format's normal numbers, 30 at most."""
    return 2.0 ** round(share * min(math.log2(stored.max / stored.smallest_normal), 30.0))
