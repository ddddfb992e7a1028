# SPDX-License-Identifier: Apache-2.0
"""Keys of streams of random bits, which depend on nothing but a seed and a count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

_MASK = 2**64 - 1


@dataclass
class Draws:
    """How many streams were drawn from so far; those who share one object never draw from the same."""

    undone: ClassVar = ("count",)
    count: int = 0


def stream_key(seed: int, count: int) -> int:
    """64 bits that tell the stream number `count` of `seed` from all others (SplitMix64)."""
    key = _mixed(seed & _MASK)
    return _mixed((key + count * 0x9E3779B97F4A7C15) & _MASK)


def _mixed(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
