# SPDX-License-Identifier: Apache-2.0
"""Exact arithmetic on powers of two, by their exponents: a logarithm would round."""

from __future__ import annotations

import math
import sys
from typing import Any, Union

import numpy as np
from numpy.typing import NDArray

from .validation import positive_number, scalar


def floor_power_of_two(value: float) -> float:
    """Largest power of two that is not larger than `value`, which is positive and finite."""
    return math.ldexp(0.5, math.frexp(value)[1])


def is_power_of_two(value: float) -> bool:
    """True if multiplying by `value` is exact; False for 0, negative numbers, infinities and NaN."""
    return math.frexp(value)[0] == 0.5


def scale_text(scale: float) -> str:
    """Write a scale: a small or large power of two with its exponent (2^11), others in digits."""
    if is_power_of_two(scale) and not 1.0 <= scale <= 16.0:
        return f"2^{math.frexp(scale)[1] - 1}"
    return f"{scale:g}"


def clamp_scale(scale: float) -> float:
    """Clamp `scale` to positive normal finite numbers, after under- or overflow in arithmetic."""
    return min(max(scale, sys.float_info.min), sys.float_info.max)


def within_float32(scale: float) -> float:
    """Clamp `scale` to the range in which float32 can multiply and divide by it."""
    largest = 2.0**100  # below 2**126, whose reciprocal is the smallest normal number of float32
    return min(max(scale, 1.0 / largest), largest)


def get_power_of_two_scale(scale: Union[float, NDArray[Any]]) -> NDArray[np.float64]:
    """Round a scale down to a power of two.

    Args:
        scale: a positive finite number, or a NumPy scalar or 0-dim array of any dtype.

    Returns:
        0-dim float64 array; never 0 and never infinite.

    Raises:
        ValueError: `scale` is not positive and finite.

    Example:
        >>> from nnabla_adaloss import get_power_of_two_scale
        >>> float(get_power_of_two_scale(100.0))
        64.0
    """
    return np.array(floor_power_of_two(positive_number("scale", scalar(scale))))
