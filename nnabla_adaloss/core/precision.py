# SPDX-License-Identifier: Apache-2.0
"""Formats of each layer: those that it stores, and those that its matrix products read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Dict, Literal, Mapping, Optional, Sequence, Union

from .formats import FLOAT16, FORMATS, DTypeLike, Format, FormatName, get_format, name_of
from .layer_selection import matches, matches_all, pattern_error
from .validation import boolean, integer

NARROWEST_SCALAR = 16  # bits of the narrowest format of scalars
_64_BITS = 2**64 - 1
_STATE_STEP = 0x9E3779B97F4A7C15  # between successive states of SplitMix64


@dataclass(frozen=True, init=False)
class Precision:
    """Formats that forward and backward store; accepted wherever `storage=` is.

    Args:
        forward: the format of activations, and of weights where they are used; a name or a `Format`.
        backward: the format of gradients. None: the same as `forward`.
        saturate: numbers beyond these two become the largest one instead of an infinity or NaN.
        operands_only: only operands of matrix products are rounded, to `forward` (activations and weights)
            and `backward` (output gradients), as usual in 8 bits: scaled by a power of two for each array
            that brings its largest magnitude just below the format's. Everything else is stored in
            `otherwise`. Infinities and NaNs stay, also with `saturate`.
        otherwise: the format of the rest: everything but operands with `operands_only`; else arrays of a
            single element (a loss, a loss weight's product) where the other format has less than 16 bits.
        stochastic_seed: round gradients to `backward` up or down at random, so that the expected value is the
            gradient, reproducibly by seed. None: half to even.

    Raises:
        TypeError: `saturate` or `operands_only` is not a boolean, or `stochastic_seed` not an integer.
        ValueError: a format is unknown, or `otherwise` has less than 16 bits.

    Example:
        >>> from nnabla_adaloss import Precision
        >>> Precision("float8_e4m3", "float8_e5m2", saturate=True).backward.max
        57344.0
        >>> print(Precision("float8_e4m3", "bfloat16", operands_only=True, otherwise="bfloat16"))
        bfloat16, and float8_e4m3 with gradients in bfloat16 in matrix products
    """

    forward: Format
    backward: Format
    operands_only: bool
    otherwise: Format
    stochastic_seed: Optional[int]

    def __init__(
        self,
        forward: Union[FormatName, Format] = "float16",
        backward: Optional[Union[FormatName, Format]] = None,
        saturate: bool = False,
        *,
        operands_only: bool = False,
        otherwise: Union[FormatName, Format] = "float16",
        stochastic_seed: Optional[int] = None,
    ) -> None:
        boolean("saturate", saturate)
        boolean("operands_only", operands_only)
        stored = get_format(forward, "forward")
        gradients = stored if backward is None else get_format(backward, "backward")
        rest = get_format(otherwise, "otherwise")
        if rest.bits < NARROWEST_SCALAR:
            raise ValueError(
                f"otherwise={rest.name!r} has {rest.bits} bits: it must have {NARROWEST_SCALAR} or more"
            )
        if stochastic_seed is not None:
            stochastic_seed = integer("stochastic_seed", stochastic_seed)
        if saturate:
            stored, gradients = stored.saturating(), gradients.saturating()
            # If only operands saturate, the other arrays still show an overflow.
            rest = rest if operands_only else rest.saturating()
        # Assignments would raise: the dataclass is frozen.
        vars(self).update(forward=stored, backward=gradients, otherwise=rest)
        vars(self).update(operands_only=operands_only, stochastic_seed=stochastic_seed)

    @cached_property
    def stored_data(self) -> Format:
        """Storage format of activations."""
        return self.otherwise if self.operands_only else self.forward

    @cached_property
    def stored_gradients(self) -> Format:
        """Storage format of gradients, whose range loss scales respect."""
        return self.otherwise if self.operands_only else self.backward

    def data_format(self, size: int) -> Format:
        """Storage format of an activation of `size` elements."""
        return self._of_size(self.stored_data, size)

    def gradient_format(self, size: int) -> Format:
        """Storage format of a gradient of `size` elements."""
        return self._of_size(self.stored_gradients, size)

    def random_key(self, count: int) -> Optional[int]:
        """64-bit key (SplitMix64) of the `count`-th array rounded at random; None without random rounding."""
        if self.stochastic_seed is None:
            return None
        # Not mixed, two seeds that differ by `_STATE_STEP` would have the same keys, one array later.
        return _mix(_mix(self.stochastic_seed) + count * _STATE_STEP)

    def _of_size(self, stored: Format, size: int) -> Format:
        # A loss weight of 1e-10 would underflow in 8 bits, and a scalar saves no memory.
        return self.otherwise if size == 1 and stored.bits < NARROWEST_SCALAR else stored

    def __str__(self) -> str:
        both = self.forward.name
        if self.forward != self.backward:
            both = f"{both} with gradients in {self.backward.name}"
        return f"{self.otherwise.name}, and {both} in matrix products" if self.operands_only else both


FP8_HYBRID = Precision("float8_e4m3", "float8_e5m2", saturate=True, operands_only=True, otherwise=FLOAT16)

# Precisions that `storage=` accepts by name.
PRECISIONS: Dict[str, Precision] = {
    **{name: Precision(stored) for name, stored in FORMATS.items()},
    "fp8_hybrid": FP8_HYBRID,
}

PrecisionName = Literal[FormatName, "fp8_hybrid"]  # names that `storage=` accepts
PrecisionLike = Union[PrecisionName, DTypeLike, Format, Precision]  # types that stand for one precision

StorageLike = Union[PrecisionLike, Mapping[str, PrecisionLike]]
"""Types that `storage=` accepts: one precision, or one for each pattern of layer names."""


def get_precision(storage: PrecisionLike, argument: str = "storage") -> Precision:
    """Look up a precision; ValueError, naming `argument`, if it is unknown."""
    if isinstance(storage, Precision):
        return storage
    if isinstance(storage, Format):
        return Precision(storage)
    precision = PRECISIONS.get(name_of(storage))
    if precision is None:
        raise ValueError(f"{argument}={storage!r} is unknown; choose one of {', '.join(PRECISIONS)}")
    return precision


FP32 = Precision("float32")  # of layers that no pattern matches


class LayerPrecisions:
    """Precision of each layer: that of the first pattern that matches its name, else fp32."""

    def __init__(self, storage: StorageLike) -> None:
        by_pattern = storage if isinstance(storage, Mapping) else {"*": storage}
        if not by_pattern:
            raise ValueError("storage is an empty mapping: name a pattern of layers, such as '*'")
        # Precisions by pattern, in order; one for all has the pattern "*".
        self.storage: Dict[str, Precision] = {}
        for pattern, precision in by_pattern.items():
            if not isinstance(pattern, str):
                raise TypeError(f"storage has the key {pattern!r}; patterns of layer names are strings")
            argument = f"storage[{pattern!r}]" if by_pattern is storage else "storage"
            self.storage[pattern] = get_precision(precision, argument)
        patterns = list(self.storage)
        for pattern, following in zip(patterns, patterns[1:]):
            if matches_all(pattern):
                raise ValueError(
                    f"storage has the pattern {following!r} after {pattern!r}, which matches every "
                    f"layer; the first pattern that matches decides, so put {pattern!r} last"
                )

    @cached_property
    def common(self) -> Optional[Precision]:
        """Common precision of all layers; None if they differ."""
        # `__init__` refuses patterns after one that matches every layer: if that is the first, it is alone.
        first, precision = next(iter(self.storage.items()))
        return precision if matches_all(first) else None

    @cached_property
    def narrowest(self) -> Precision:
        """Precision that stores gradients in the smallest range."""
        return min(self.storage.values(), key=lambda p: p.stored_gradients.max)

    def of(self, layer: str) -> Precision:
        """Precision of a layer."""
        return next((p for pattern, p in self.storage.items() if matches(pattern, layer)), FP32)

    def check(self, layers: Sequence[str]) -> None:
        """Raise ValueError unless every pattern is the first match of a layer, or matches everything."""
        undecided = set(layers)  # layers that no earlier pattern matches
        for pattern in self.storage:
            matched = {layer for layer in layers if matches(pattern, layer)}
            if matched.isdisjoint(undecided) and not matches_all(pattern):
                why = "only layers that an earlier pattern matches" if matched else "no layer"
                raise ValueError(pattern_error("storage", pattern, layers, why))
            undecided -= matched

    def __str__(self) -> str:
        parts = [f"{precision} in {pattern}" for pattern, precision in self.storage.items()]
        return "; ".join(parts) if self.common is None else str(self.common)


def widest(precisions: Sequence[Precision]) -> Precision:
    """Precision that stores data in the most bits; of equally wide ones, that of the largest range."""
    return max(precisions, key=lambda p: (p.stored_data.bits, p.stored_data.max))


def _mix(x: int) -> int:
    """Output of SplitMix64 in the state `x`."""
    x = (x + _STATE_STEP) & _64_BITS
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _64_BITS
    return x ^ (x >> 31)
