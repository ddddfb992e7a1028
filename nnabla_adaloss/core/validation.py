# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments, with errors that name the argument and its value."""

from __future__ import annotations

import math
from numbers import Integral, Real


def number(name: str, value: object) -> float:
    """`value` as a Python float; TypeError unless it is a real number other than a boolean.

    ValueError for an integer that no float can hold.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r} must be a number, not {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is an integer beyond the range of floating-point numbers") from None


def positive_number(name: str, value: object) -> float:
    """`value` as a Python float; ValueError unless it is positive and finite."""
    result = number(name, value)
    if not (math.isfinite(result) and result > 0.0):
        raise ValueError(f"{name}={value!r} must be a positive finite number")
    return result


def open_share(name: str, value: object, *, usual: float) -> float:
    """`value` as a Python float; ValueError, naming the usual value, unless it lies strictly between 0 and
    1.
    """
    result = number(name, value)
    if not 0.0 < result < 1.0:
        raise ValueError(
            f"{name}={value!r} is a share of elements and must lie strictly between 0 and 1; "
            f"{usual:g} is usual"
        )
    return result


def integer(name: str, value: object) -> int:
    """`value` as a Python int; TypeError unless it is an integer other than a boolean."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}={value!r} must be an integer, not {type(value).__name__}")
    return int(value)


def boolean(name: str, value: object) -> bool:
    """`value` itself; TypeError unless it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be True or False, not {type(value).__name__}")
    return value
