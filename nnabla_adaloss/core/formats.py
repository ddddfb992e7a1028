# SPDX-License-Identifier: Apache-2.0
"""Floating point storage formats and the range of numbers each one holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Union


@dataclass(frozen=True)
class Format:
    """A binary floating point format with subnormals.

    Attributes:
        name: the name it is asked for by.
        exponent_bits: width of the exponent field.
        mantissa_bits: width of the stored significand, without the implicit leading bit.
        max: largest finite number.
        smallest_normal: smallest positive number of full precision.
        smallest_subnormal: smallest positive number.
        has_infinity: False when numbers beyond `max` become NaN.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    max: float
    smallest_normal: float
    smallest_subnormal: float
    has_infinity: bool


def _ieee(name: str, exponent_bits: int, mantissa_bits: int) -> Format:
    """A format laid out as IEEE 754 does: the highest exponent is kept for infinity and NaN."""
    bias = 2 ** (exponent_bits - 1) - 1
    return Format(
        name=name,
        exponent_bits=exponent_bits,
        mantissa_bits=mantissa_bits,
        max=(2.0 - 2.0**-mantissa_bits) * 2.0**bias,
        smallest_normal=2.0 ** (1 - bias),
        smallest_subnormal=2.0 ** (1 - bias - mantissa_bits),
        has_infinity=True,
    )


FLOAT16 = _ieee("float16", exponent_bits=5, mantissa_bits=10)
BFLOAT16 = _ieee("bfloat16", exponent_bits=8, mantissa_bits=7)
FLOAT32 = _ieee("float32", exponent_bits=8, mantissa_bits=23)
FLOAT8_E5M2 = _ieee("float8_e5m2", exponent_bits=5, mantissa_bits=2)
# The "fn" variant (arXiv 2209.05433): the highest exponent holds numbers too, only its last pattern is NaN.
FLOAT8_E4M3 = Format(
    name="float8_e4m3",
    exponent_bits=4,
    mantissa_bits=3,
    max=448.0,
    smallest_normal=2.0**-6,
    smallest_subnormal=2.0**-9,
    has_infinity=False,
)

FORMATS: Dict[str, Format] = {f.name: f for f in (FLOAT16, BFLOAT16, FLOAT32, FLOAT8_E5M2, FLOAT8_E4M3)}


def get_format(name_or_format: Union[str, Format], argument: str = "storage") -> Format:
    """The format of a name; a `Format` is handed back as it is.

    Args:
        name_or_format: a key of `FORMATS`, or a `Format`.
        argument: what the caller's own argument is called, for the error message.

    Raises:
        ValueError: the name is unknown.

    Example:
        >>> get_format("float16").max
        65504.0
    """
    if isinstance(name_or_format, Format):
        return name_or_format
    if not isinstance(name_or_format, str) or name_or_format not in FORMATS:
        raise ValueError(f"{argument}={name_or_format!r} is unknown; choose one of {', '.join(FORMATS)}")
    return FORMATS[name_or_format]
