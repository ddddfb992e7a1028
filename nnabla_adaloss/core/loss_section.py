# SPDX-License-Identifier: Apache-2.0
"""Scaling between the loss and the first layer with a weight.

A small loss weight and a mean over the batch shrink the gradient before any layer could scale it. The
functions of this section are linear in their output gradient, so a factor applied there rides on to the first
layer.
"""

from __future__ import annotations

import math

from .power_of_two import exponent_to_reach, floor_power_of_two

# Where a scalar is lifted to: far above any underflow, 16 times below the largest float16 where it is spread
# (a mean divides by the number of elements), and in the middle of float16's range where it is yet to meet a
# weight.
_SPREAD_TARGET = 2.0**12
_SCALAR_TARGET = 2.0**7
# How far above start_scale these targets may lie: then backing start_scale off ends an overflow that they
# cause.
_SPREAD_LIFT = 2.0**9
_SCALAR_LIFT = 2.0**4
# What a target leaves free below u_max, for formats with little room.
_HEADROOM = 8.0
# A gradient of many elements is lifted once it is this much smaller than what the loss gradient started with.
_SHRUNK = 2.0**-10


def loss_section_factor(
    abs_max: float, count: int, scale: float, start_scale: float, *, u_max: float, expands: bool = True
) -> float:
    """The factor to multiply a gradient by on its way from the loss to the first layer.

    One element (the loss, a loss weight): there is nothing yet that could overflow beside it, so it is lifted
    into [2**12, 2**13) when the function spreads it over many elements, and into [2**7, 2**8) when it does
    not; but to no more than 2**9 or 2**4 times `start_scale`, and to no more than an eighth of `u_max` (each
    rounded down to a power of two). It is never lowered.

    More elements: below t = start_scale * 2**-10 they are raised into [t, 2t); above `start_scale`, when an
    earlier factor raised them, they are lowered into (start_scale / 2, start_scale], but not so far that they
    would carry less than `start_scale`; in between they are left alone.

    Args:
        abs_max: max|g| as stored, that is with its scale.
        count: number of elements of the gradient.
        scale: the accumulated scale that the gradient carries now.
        start_scale: the scale that the loss gradient started with.
        u_max: largest magnitude of the storage format.
        expands: whether the function spreads one element over many, as a mean, a sum or a broadcast does.

    Returns:
        A power of two, positive and finite; 1 when `abs_max` is 0 or not finite.

    Example:
        >>> loss_section_factor(8e-6, 1, 8.0, 8.0, u_max=65504.0)
        536870912.0
        >>> loss_section_factor(33.0, 1280, 2.0**32, 8.0, u_max=65504.0)
        0.125
    """
    if abs_max == 0.0 or not math.isfinite(abs_max):
        return 1.0
    highest = u_max / _HEADROOM
    if count == 1:
        if expands:
            target = min(_SPREAD_TARGET, _SPREAD_LIFT * start_scale, highest)
        else:
            target = min(_SCALAR_TARGET, _SCALAR_LIFT * start_scale, highest)
        return _raising(abs_max, floor_power_of_two(target), scale)
    if abs_max > start_scale and scale > start_scale:
        # Two limits: max|g| ends in (start_scale / 2, start_scale], and start_scale is kept.
        exponent = max(_exponent_to_fall(abs_max, start_scale), exponent_to_reach(scale, start_scale))
        return math.ldexp(1.0, max(exponent, -1022))
    return _raising(abs_max, min(start_scale * _SHRUNK, highest), scale)


def _raising(abs_max: float, target: float, scale: float) -> float:
    """The power of two that raises `abs_max` into [target, 2 target); 1 when it is there or above.

    Less than that where it, or the scale that it leads to, would leave float64.
    """
    exponent = min(exponent_to_reach(abs_max, target), 1023, 1023 - math.frexp(scale)[1])
    return math.ldexp(1.0, max(exponent, 0))


def _exponent_to_fall(value: float, bound: float) -> int:
    """Largest k with value * 2**k <= bound; both are positive and finite."""
    return -exponent_to_reach(bound, value)
