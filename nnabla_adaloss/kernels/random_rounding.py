# SPDX-License-Identifier: Apache-2.0
"""Rounding at random in NumPy, where there is no compiled kernel, with the random bits of those."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.formats import Format


def random_bits(key: int, count: int) -> NDArray[np.uint32]:
    """32 random bits for each index below `count`: two rounds of an integer hash.

    Example:
        >>> random_bits(12345, 2).tolist()
        [2318249750, 2064642780]
    """
    low, high = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32)
    with np.errstate(over="ignore"):
        return _mixed(_mixed(np.arange(count, dtype=np.uint32) ^ low) + high)


def _mixed(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    # "lowbias32": every bit of the result depends on every bit of x.
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def rounded_at_random(values: NDArray[np.float32], storage: Format, key: int) -> NDArray[Any]:
    """`values`, each rounded to one of its two neighbours in `storage`, with the number as expected value.

    Zeros, numbers of the format and what is not finite stay, and so does what is beyond the largest number.

    Args:
        values: what is rounded, of any shape.
        storage: the format.
        key: 64 bits that choose the random numbers.
    """
    wide = np.abs(values.astype(np.float64))
    inside = wide <= storage.max
    exponents = np.frexp(np.where(inside, wide, 0.0))[1] - 1
    _, normal_exponent = np.frexp(storage.smallest_normal)
    unit = np.ldexp(1.0, np.maximum(exponents, normal_exponent - 1) - storage.mantissa_bits)
    units = np.where(inside, wide, 0.0) / unit
    whole = np.floor(units)
    random = random_bits(key, values.size).reshape(values.shape)
    up = random < np.floor((units - whole) * 2.0**32)
    result = np.copysign((whole + up) * unit, values).astype(np.float32)
    return np.where(inside, result, values)
