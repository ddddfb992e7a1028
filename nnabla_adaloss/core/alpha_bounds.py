# SPDX-License-Identifier: Apache-2.0
"""Bounds of a layer's alpha: the scaled copy of its weight must neither overflow nor lose its bits."""

from __future__ import annotations

import math
from typing import NamedTuple, Optional

from .formats import Format
from .layer_alpha import largest_alpha
from .power_of_two import floor_power_of_two

# Shares of a format's exponents, at most of float16's: distance of a scaled weight's amax above the smallest
# normal number, limit of lowering scales for it, and further limit if the weight would lose nearly all its
# bits.
_ENOUGH, _SPARE, _FURTHER = 0.27, 0.4, 0.27
_EXPONENTS = 30.0

# A scaled weight with fewer bits is not worth lowering scales.
_FEWEST_BITS = 4


class AlphaBounds(NamedTuple):
    """Bounds of the alpha of layers with one weight: powers of two, so that equal choices compare equal."""

    highest: float  # the largest that keeps the scaled copy in range
    least_for_bits: float = 0.0  # the smallest that keeps nearly all bits of it
    least_for_few_bits: float = 0.0  # the smallest that keeps a few bits of its largest element
    beyond_floor: float = 1.0  # factor of lowering scales beyond their floors for these few

    def intersection(self, other: AlphaBounds) -> AlphaBounds:
        """Stricter ones of both bounds."""
        highest, *others = zip(self, other)
        return AlphaBounds(min(highest), *map(max, others))


def alpha_bounds(weight_amax: float, u_max: float, stored: Optional[Format]) -> AlphaBounds:
    """Bounds for a weight whose scaled copy may reach `u_max`; `stored`: the copy's format, None: float32."""
    highest = largest_alpha(weight_amax, u_max)
    if stored is None:
        return AlphaBounds(highest)
    # `unit` is the alpha that brings the weight's amax to 1, or down to half of it.
    unit, bits = floor_power_of_two(1.0 / weight_amax), min(_FEWEST_BITS, stored.mantissa_bits)
    # The copy's amax is so far above the smallest normal number that nearly all elements are normal. An alpha
    # of 1 is always enough: it keeps the bits that the weight has.
    enough = min(unit * stored.smallest_normal * _share(_ENOUGH, stored), 1.0)
    least = unit * stored.smallest_subnormal * 2.0**bits
    return AlphaBounds(highest, enough, least, _share(_FURTHER, stored))


def spare_of(stored: Format) -> float:
    """Factor by which a scale may stay below its limit while gradients of this format keep their bits."""
    return _share(_SPARE, stored)


def _share(share: float, stored: Format) -> float:
    """Power of two that spans this share of a format's exponents."""
    return 2.0 ** round(share * min(math.log2(stored.max / stored.smallest_normal), _EXPONENTS))
