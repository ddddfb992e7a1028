# SPDX-License-Identifier: Apache-2.0
"""Floating point storage formats: their ranges and rounding."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Callable, Dict, Literal, Type, Union

import numpy as np

from .power_of_two import is_power_of_two
from .validation import boolean, integer, limited, number, positive_number

_exponent_bits = limited(integer, lambda n: 1 <= n <= 8, "must lie in [1, 8]: emulation is in float32")
_mantissa_bits = limited(integer, lambda n: 1 <= n <= 23, "must lie in [1, 23]: emulation is in float32")


@dataclass(frozen=True)
class Format:
    """Binary floating point format with subnormals, at most as wide as float32; accepted wherever a name is.
    `Format.ieee` makes one from the widths of its fields.

    Attributes:
        name: its name in messages and saved states.
        exponent_bits: width of the exponent field.
        mantissa_bits: width of the stored significand, without the implicit leading bit; 23 only with the
            range of float32.
        max: largest finite number.
        smallest_normal: smallest positive number of full precision.
        smallest_subnormal: smallest positive number.
        has_infinity: False when numbers beyond `max` become NaN.
        u_min: smallest magnitude that a loss scale keeps from underflow; 0: `smallest_subnormal`.
        saturates: numbers beyond `max`, infinities included, become `max` (with their sign) instead, as in
            the saturating conversions of the OCP 8-bit formats (OFP8 specification, revision 1.0).

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: an argument is out of range, or float32 cannot hold the format's numbers.

    Example:
        >>> from nnabla_adaloss import Format
        >>> half_as_precise = Format.ieee("float12", exponent_bits=5, mantissa_bits=6)
        >>> half_as_precise.max, half_as_precise.smallest_subnormal == 2.0**-20
        (65024.0, True)
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    max: float
    smallest_normal: float
    smallest_subnormal: float
    has_infinity: bool
    u_min: float = 0.0
    saturates: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"name={self.name!r} must be a string that is not empty")
        checks: Dict[str, Callable[[str, Any], Any]]
        checks = {"exponent_bits": _exponent_bits, "mantissa_bits": _mantissa_bits}
        checks.update(dict.fromkeys(("max", "smallest_normal", "smallest_subnormal"), positive_number))
        checks.update(dict.fromkeys(("has_infinity", "saturates"), boolean))
        for name, check in checks.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        largest = float(np.finfo(np.float32).max)
        if self.max > largest or self.smallest_normal < 2.0**-126:
            raise ValueError(
                f"max and smallest_normal of {self.name} must lie in the normal range of float32"
            )
        if self.mantissa_bits == 23 and (self.max, self.smallest_normal) != (largest, 2.0**-126):
            raise ValueError(
                f"mantissa_bits=23 of {self.name} must have the range of float32: emulation rounds to fewer "
                "bits only"
            )
        if self.smallest_subnormal != math.ldexp(self.smallest_normal, -self.mantissa_bits):
            raise ValueError(
                f"smallest_subnormal={self.smallest_subnormal!r} of {self.name} must be smallest_normal * "
                "2**-mantissa_bits"
            )
        if not is_power_of_two(self.smallest_normal) or self.nearest(self.max) != self.max:
            raise ValueError(
                f"smallest_normal of {self.name} must be a power of two, and max one of its numbers"
            )
        if number("u_min", self.u_min) == 0.0:
            object.__setattr__(self, "u_min", self.smallest_subnormal)
        positive_number("u_min", self.u_min)

    @classmethod
    def ieee(cls, name: str, exponent_bits: int, mantissa_bits: int, *, u_min: float = 0.0) -> Format:
        """Make a format as in IEEE 754: the highest exponent is reserved for infinity and NaN."""
        mantissa_bits = _mantissa_bits("mantissa_bits", mantissa_bits)
        exponent_bits = _exponent_bits("exponent_bits", exponent_bits)
        if exponent_bits == 1:
            raise ValueError("exponent_bits=1 must be 2 or more: the highest exponent is reserved")
        bias = 2 ** (exponent_bits - 1) - 1
        return cls(
            name=name,
            exponent_bits=exponent_bits,
            mantissa_bits=mantissa_bits,
            max=(2.0 - 2.0**-mantissa_bits) * 2.0**bias,
            smallest_normal=2.0 ** (1 - bias),
            smallest_subnormal=2.0 ** (1 - bias - mantissa_bits),
            has_infinity=True,
            u_min=u_min,
        )

    @cached_property
    def beyond_max(self) -> float:
        """Result of rounding numbers beyond `max`: infinity, NaN, or `max` itself."""
        if self.saturates:
            return self.max
        return math.inf if self.has_infinity else math.nan

    @property
    def rounds_float32(self) -> bool:
        """True if float32 has numbers that this format lacks."""
        return self.mantissa_bits < FLOAT32.mantissa_bits

    @property
    def bits(self) -> int:
        """Width of a number."""
        return 1 + self.exponent_bits + self.mantissa_bits

    def saturating(self, saturates: bool = True) -> Format:
        """The same format with or without saturating conversions."""
        return self if saturates == self.saturates else replace(self, saturates=saturates)

    def nearest(self, value: float) -> float:
        """Round `value` to the format, half to even."""
        magnitude = abs(value)
        if math.isfinite(magnitude):
            # Distance of the format's numbers around `value`; subnormal ones lie equally far apart.
            step = math.ldexp(1.0, math.frexp(magnitude)[1] - 1 - self.mantissa_bits)
            step = max(step, self.smallest_subnormal)
            magnitude = round(magnitude / step) * step
        return math.copysign(self.beyond_max if magnitude > self.max else magnitude, value)


# 6e-8 as published, 0.7 % above 2**-24.
FLOAT16 = Format.ieee("float16", exponent_bits=5, mantissa_bits=10, u_min=6e-8)
BFLOAT16 = Format.ieee("bfloat16", exponent_bits=8, mantissa_bits=7)
# Far above 2**-149: numbers 1e-14 times as large as those kept are still normal.
FLOAT32 = Format.ieee("float32", exponent_bits=8, mantissa_bits=23, u_min=1e-23)
FLOAT8_E5M2 = Format.ieee("float8_e5m2", exponent_bits=5, mantissa_bits=2)
# The "fn" variant (arXiv 2209.05433): the highest exponent has numbers too, only its last pattern is NaN.
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

_OwnName = Literal["float16", "bfloat16", "float32", "float8_e5m2", "float8_e4m3"]
_Alias = Literal["half", "fp16", "bf16", "float", "fp32", "e5m2", "e4m3", "float8_e4m3fn"]
FormatName = Literal[_OwnName, _Alias]
"""Names of formats: this package's, and those of nnabla, torch and papers."""

_ALIASES: Dict[str, str] = {
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "fp32": "float32",
    "e5m2": "float8_e5m2",
    "e4m3": "float8_e4m3",
    "float8_e4m3fn": "float8_e4m3",
}


DTypeLike = Union[FormatName, "np.dtype[Any]", Type[np.generic]]
"""A name of a format, or a dtype of NumPy's."""


def canonical_name(name: str) -> str:
    """This package's name for a format named as in nnabla, torch or papers."""
    return _ALIASES.get(name, name)


def name_of(name_or_dtype: object) -> str:
    """Name of a format, given by a name or a dtype of NumPy's, known or not; empty for anything else."""
    if isinstance(name_or_dtype, np.dtype):
        return name_or_dtype.name
    if isinstance(name_or_dtype, type) and issubclass(name_or_dtype, np.generic):
        return name_or_dtype.__name__
    return canonical_name(name_or_dtype) if isinstance(name_or_dtype, str) else ""


def get_format(name_or_format: Union[DTypeLike, Format], argument: str = "storage") -> Format:
    """Return a `Format`, or look it up by name or dtype; ValueError, naming `argument`, if unknown."""
    if isinstance(name_or_format, Format):
        return name_or_format
    result = FORMATS.get(name_of(name_or_format))
    if result is None:
        raise ValueError(f"{argument}={name_or_format!r} is unknown; choose one of {', '.join(FORMATS)}")
    return result
