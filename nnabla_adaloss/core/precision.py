# SPDX-License-Identifier: Apache-2.0
"""Which formats a training stores its numbers in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Union

from .formats import Format, get_format
from .validation import boolean


@dataclass(frozen=True, init=False)
class Precision:
    """The formats of what forward and what backward stores; it can be given wherever `storage=` is.

    Args:
        forward: the format of activations, and of weights where they are used; a name or a `Format`.
        backward: the format of gradients. None: the same as `forward`.
        saturate: numbers that are too large become the largest one instead of an infinity or NaN.

    Attributes:
        forward: the `Format` of activations and weights.
        backward: the `Format` of gradients.

    Raises:
        TypeError: `saturate` is no boolean.
        ValueError: a format is unknown.

    Example:
        >>> Precision("float8_e4m3", "float8_e5m2", saturate=True).backward.max
        57344.0
        >>> str(Precision("float16"))
        'float16'
    """

    forward: Format
    backward: Format

    def __init__(
        self,
        forward: Union[str, Format] = "float16",
        backward: Optional[Union[str, Format]] = None,
        saturate: bool = False,
    ) -> None:
        boolean("saturate", saturate)
        stored = get_format(forward, "forward")
        gradients = stored if backward is None else get_format(backward, "backward")
        object.__setattr__(self, "forward", stored.saturating() if saturate else stored)
        object.__setattr__(self, "backward", gradients.saturating() if saturate else gradients)

    def __str__(self) -> str:
        if self.forward == self.backward:
            return self.forward.name
        return f"{self.forward.name} with gradients in {self.backward.name}"


StorageLike = Union[str, Format, Precision]
"""What `storage=` takes."""


def get_precision(storage: StorageLike, argument: str = "storage") -> Precision:
    """The precision that a name, a `Format` or a `Precision` stands for.

    Args:
        storage: a key of `FORMATS`, a `Format` for everything, or a `Precision`.
        argument: what the caller's own argument is called, for the error message.

    Raises:
        ValueError: the name is unknown.

    Example:
        >>> get_precision("bfloat16").backward.name
        'bfloat16'
    """
    return storage if isinstance(storage, Precision) else Precision(get_format(storage, argument))
