# SPDX-License-Identifier: Apache-2.0
"""Which formats a training stores its numbers in, and which ones its matrix products read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Dict, Mapping, Optional, Union

from .formats import FLOAT16, FORMATS, Format, canonical_name, get_format
from .validation import boolean, integer

NARROWEST_SCALAR = 16
"""Bits of the narrowest format that an array of one element is stored in."""


@dataclass(frozen=True, init=False)
class Precision:
    """The formats of what forward and what backward stores; it can be given wherever `storage=` is.

    Everything is stored in `forward` and `backward`, or, with `operands_only`, just what matrix products
    read. In 8 bits only the latter is usual: every tensor that a product reads is multiplied by a power of
    two of its own before it is rounded, and divided by it again.

    Args:
        forward: the format of activations, and of weights where they are used; a name or a `Format`.
        backward: the format of gradients. None: the same as `forward`.
        saturate: numbers that are too large for these two become the largest one instead of an infinity or
            NaN.
        operands_only: only what matrix products read is rounded to `forward` (activations and weights) and
            `backward` (output gradients), with a power of two for each array that brings its largest
            magnitude just below the format's. What they write is stored in `otherwise`, as is everything
            else. Infinities and NaNs are read as what they are, also with `saturate`.
        otherwise: the format of what is not stored in the other two: everything but operands with
            `operands_only`; else arrays of a single element (a loss, a loss weight's product) where the other
            format has less than 16 bits. It has 16 bits or more.
        stochastic_seed: gradients are rounded to `backward` up or down at random, so that the expected value
            is the gradient; the same seed gives the same numbers. None: half to even.

    Attributes:
        forward: the `Format` of activations and weights.
        backward: the `Format` of gradients.
        operands_only: whether only matrix products read these.
        otherwise: the `Format` of the rest.
        stochastic_seed: the seed of stochastic rounding, or None.

    Raises:
        TypeError: `saturate` or `operands_only` is no boolean, or `stochastic_seed` no integer.
        ValueError: a format is unknown, or `otherwise` has less than 16 bits.

    Example:
        >>> Precision("float8_e4m3", "float8_e5m2", saturate=True).backward.max
        57344.0
        >>> str(Precision("float16"))
        'float16'
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
        forward: Union[str, Format] = "float16",
        backward: Optional[Union[str, Format]] = None,
        saturate: bool = False,
        *,
        operands_only: bool = False,
        otherwise: Union[str, Format] = "float16",
        stochastic_seed: Optional[int] = None,
    ) -> None:
        boolean("saturate", saturate)
        boolean("operands_only", operands_only)
        stored = get_format(forward, "forward")
        gradients = stored if backward is None else get_format(backward, "backward")
        rest = get_format(otherwise, "otherwise")
        if rest.bits < NARROWEST_SCALAR:
            raise ValueError(
                f"otherwise={rest.name!r} has {rest.bits} bits: what is not stored in 8 bits needs 16 or more"
            )
        if stochastic_seed is not None:
            integer("stochastic_seed", stochastic_seed)
        # Where only operands saturate, an overflow stays to be seen in what is stored.
        saturates = saturate and not operands_only
        self._set("forward", stored.saturating() if saturate else stored)
        self._set("backward", gradients.saturating() if saturate else gradients)
        self._set("operands_only", operands_only)
        self._set("otherwise", rest.saturating() if saturates else rest)
        self._set("stochastic_seed", stochastic_seed)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @cached_property
    def stored_data(self) -> Format:
        """The format that activations are stored in."""
        return self.otherwise if self.operands_only else self.forward

    @cached_property
    def stored_gradients(self) -> Format:
        """The format that gradients are stored in: what loss scales must keep them in the range of."""
        return self.otherwise if self.operands_only else self.backward

    def data_format(self, size: int) -> Format:
        """The format that an activation of `size` elements is stored in."""
        return self.stored_data if size != 1 else self._single(self.stored_data)

    def gradient_format(self, size: int) -> Format:
        """The format that a gradient of `size` elements is stored in."""
        return self.stored_gradients if size != 1 else self._single(self.stored_gradients)

    def _single(self, stored: Format) -> Format:
        # A loss weight of 1e-10 would be lost in 8 bits, and there is nothing to win.
        return self.otherwise if stored.bits < NARROWEST_SCALAR else stored

    def __str__(self) -> str:
        both = self.forward.name
        if self.forward != self.backward:
            both = f"{both} with gradients in {self.backward.name}"
        return f"{self.otherwise.name}, and {both} in matrix products" if self.operands_only else both


FP8_HYBRID = Precision("float8_e4m3", "float8_e5m2", saturate=True, operands_only=True, otherwise=FLOAT16)

PRECISIONS: Dict[str, Precision] = {
    **{name: Precision(stored) for name, stored in FORMATS.items()},
    "fp8_hybrid": FP8_HYBRID,
}
"""Everything that `storage=` knows by name."""

PrecisionLike = Union[str, Format, Precision]
"""What one precision can be given as."""

StorageLike = Union[PrecisionLike, Mapping[str, PrecisionLike]]
"""What `storage=` takes: one precision, or one for each pattern of layer names."""


def get_precision(storage: PrecisionLike, argument: str = "storage") -> Precision:
    """The precision that a name, a `Format` or a `Precision` stands for.

    Args:
        storage: a key of `PRECISIONS` or another common name of a format, such as `"fp16"`; a `Format` for
            everything; or a `Precision`.
        argument: what the caller's own argument is called, for the error message.

    Raises:
        ValueError: the name is unknown.

    Example:
        >>> get_precision("bfloat16").backward.name
        'bfloat16'
        >>> get_precision("fp8_hybrid").stored_gradients.name
        'float16'
    """
    if isinstance(storage, Precision):
        return storage
    if isinstance(storage, Format):
        return Precision(storage)
    found = PRECISIONS.get(canonical_name(storage)) if isinstance(storage, str) else None
    if found is None:
        raise ValueError(f"{argument}={storage!r} is unknown; choose one of {', '.join(PRECISIONS)}")
    return found
