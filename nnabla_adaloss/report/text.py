# SPDX-License-Identifier: Apache-2.0
"""Numbers for people to read."""

from __future__ import annotations

import math
from typing import Callable, Mapping, Optional, Sequence

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def power(value: float) -> str:
    """A scale: a large or small power of two with an exponent (2¹⁰), any other number in digits."""
    if math.frexp(value)[0] == 0.5 and not 1.0 <= value <= 16.0:
        return "2" + str(math.frexp(value)[1] - 1).translate(_RAISED)
    return f"{value:g}"


def extent(values: Sequence[float], written: Callable[[float], str] = power) -> str:
    """The smallest and the largest value."""
    return f"{written(min(values))} to {written(max(values))}"


def percent(share: Optional[float]) -> str:
    """A share; one that is not zero does not look like zero, nor does one that nobody has counted."""
    if share is None:
        return "not counted"
    if 0.0 < share < 1e-4:
        return "< 0.01 %"
    return f"{100.0 * share:.4g} %" if share < 0.01 else f"{100.0 * share:.3g} %"


def in_words(name: str) -> str:
    """A cause or a reason, without underscores."""
    return name.replace("_", " ").replace("nonfinite", "non-finite")


def by_cause(lost: Mapping[str, int]) -> str:
    """How many batches were lost for which cause: `2 overflow, 1 non-finite loss`."""
    return ", ".join(f"{number} {in_words(cause)}" for cause, number in lost.items())
