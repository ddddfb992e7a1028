# SPDX-License-Identifier: Apache-2.0
"""Scaling between the loss and the first layer with a weight, with a given S0.

A small loss weight and a mean over the batch shrink the gradient before any layer could scale it.
"""

from __future__ import annotations

import math

from .power_of_two import exponent_to_reach, floor_power_of_two

# Where a scalar is lifted to before it meets a weight of unknown size: the middle of float16's range. And how
# far above start_scale that may be, so that lowering start_scale ends an overflow that the lift causes.
_SCALAR_TARGET = 2.0**7
_SCALAR_LIFT = 2.0**4
# What a target leaves free below u_max, for formats of a small range.
_HEADROOM = 8.0
# A gradient of many elements is lifted once it is this much smaller than what the loss gradient started with:
# below that, a float16 gradient that started with 8 is subnormal.
_SHRUNK = 2.0**-16


def loss_section_factor(
    abs_max: float,
    count: int,
    scale: float,
    start_scale: float,
    *,
    expands: bool,
    u_max: float,
    several: bool = False,
) -> float:
    """The power of two to multiply a gradient by, of which `abs_max` is the largest magnitude as stored, with
    `scale`; 1 when that is 0 or not finite. `expands`: the function's input has several elements.
    """
    if abs_max == 0.0 or not math.isfinite(abs_max):
        return 1.0
    highest = u_max / _HEADROOM
    if count > 1:
        # Not before they are below this.
        return _lift_to(min(start_scale * _SHRUNK, highest), abs_max, scale)
    if not expands:
        # One element that stays one is to pass through a small loss weight unharmed.
        target = min(_SCALAR_TARGET, _SCALAR_LIFT * start_scale, highest)
        return _lift_to(floor_power_of_two(target), abs_max, scale)
    # One that is about to be spread is brought to what it would be with a loss weight of 1. Where several
    # losses meet, a small one might overflow there as the others do not.
    target = min(start_scale, highest)
    lifted = min(target, _SCALAR_TARGET) if several else target
    if abs_max <= lifted:
        # The largest power of two that keeps it at or below the target.
        return _within(-exponent_to_reach(lifted, abs_max), scale)
    if abs_max <= target:
        return 1.0
    # Lowered into (target / 2, target], but to no less than start_scale: lowering that ends any overflow.
    exponent = min(max(-exponent_to_reach(target, abs_max), exponent_to_reach(scale, start_scale)), 0)
    return math.ldexp(1.0, max(exponent, -1022))


def _lift_to(target: float, abs_max: float, scale: float) -> float:
    """The power of two that lifts `abs_max` into [target, 2 target); 1 when it is there or above."""
    return _within(exponent_to_reach(abs_max, target), scale)


def _within(exponent: int, scale: float) -> float:
    """2**exponent, or less where it, or the scale that it leads to, would leave float64."""
    return math.ldexp(1.0, max(min(exponent, 1023, 1024 - math.frexp(scale)[1]), 0))
