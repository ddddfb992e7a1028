# SPDX-License-Identifier: Apache-2.0
"""Bounds of a layer's alpha: the scaled copy of its weight must neither overflow nor lose its bits."""

from __future__ import annotations

import math
from typing import NamedTuple, Optional

from .formats import Format
from .layer_alpha import largest_alpha
from .power_of_two import floor_power_of_two

# Shares of the exponents of a format, of float16's at most: how far above the smallest normal number the
# largest element of a scaled weight is to stay, how far scales are lowered for that, and how much further
# where hardly a bit of the weight would be left.
_ENOUGH, _SPARE, _FURTHER = 0.27, 0.4, 0.27
_EXPONENTS = 30.0

# Of a scaled weight with fewer bits nothing can be kept.
_FEWEST_BITS = 4


class AlphaBounds(NamedTuple):
    """Bounds of the alpha of layers with one weight: powers of two, so that equal choices compare equal."""

    highest: float  # the largest with which the scaled copy stays in range
    enough: float = 0.0  # the smallest with which nearly all of it keeps its bits
    least: float = 0.0  # the smallest with which its largest element keeps a few bits
    further: float = 1.0  # how far scales are lowered beyond their floors for these few

    def within(self, other: AlphaBounds) -> AlphaBounds:
        """The alphas that both allow."""
        highest, *others = zip(self, other)
        return AlphaBounds(min(highest), *map(max, others))


def alpha_bounds(weight_amax: float, u_max: float, stored: Optional[Format]) -> AlphaBounds:
    """Bounds for a weight whose scaled copy may reach `u_max` and is stored in a format; None: in float32."""
    highest = largest_alpha(weight_amax, u_max)
    if stored is None:
        return AlphaBounds(highest)
    unit, bits = floor_power_of_two(1.0 / weight_amax), min(_FEWEST_BITS, stored.mantissa_bits)
    # A small weight has no more bits itself.
    enough = min(unit * stored.smallest_normal * _share(_ENOUGH, stored), 1.0)
    least = unit * stored.smallest_subnormal * 2.0**bits
    return AlphaBounds(highest, enough, least, _share(_FURTHER, stored))


def spare_of(stored: Format) -> float:
    """How far below its limit a scale may be: gradients of this format have their bits there, too."""
    return _share(_SPARE, stored)


def _share(share: float, stored: Format) -> float:
    return 2.0 ** round(share * min(math.log2(stored.max / stored.smallest_normal), _EXPONENTS))
