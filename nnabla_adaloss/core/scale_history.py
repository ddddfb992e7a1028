# SPDX-License-Identifier: Apache-2.0
"""Loss scale from measured amaxes: the largest with a margin over the last iterations.

entry = largest magnitude of an iteration, as stored, divided by its scale
amax  = largest entry of the last `window` iterations that measured one
scale = largest power of two with scale * amax <= u_max / margin
after an overflow at scale s:  entry >= u_max / s; the component and its descendants run at s / (4 * margin),
                               until a finite pass over the batch has measured them
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, List, NamedTuple, Sequence, Tuple

from .power_of_two import clamp_scale, floor_power_of_two
from .validation import integer, number, positive_integer, positive_number

_STEP = 4.0  # factor of lowering a scale for the next try, beyond the margin below the overflow
_LEAST_MEASUREMENTS = 16  # fewer do not show the range of gradients

# Cached: making and checking a policy takes as long as reading ten functions of a graph.
_cached_replace = lru_cache(maxsize=16)(replace)


class AmaxWindow(NamedTuple):
    """Sliding maximum of magnitudes over the last iterations."""

    pushed: int = 0  # total number of entries
    # (number, magnitude): magnitudes fall, as one that is not above a later one can never be the largest.
    entries: Tuple[Tuple[int, float], ...] = ()
    amax: float = 0.0  # the largest entry, which is the first

    def push(self, magnitude: float, length: int) -> AmaxWindow:
        """Add an iteration's magnitude, and drop entries older than `length` iterations."""
        pushed = self.pushed + 1
        kept = [entry for entry in self.entries if entry[0] > pushed - length and entry[1] > magnitude]
        entries = (*kept, (pushed, magnitude))
        return AmaxWindow(pushed, entries, entries[0][1])

    def as_list(self) -> List[Any]:
        """Window as plain numbers and lists, for saving."""
        return [self.pushed, [list(entry) for entry in self.entries]]

    @classmethod
    def from_list(cls, values: Sequence[Any]) -> AmaxWindow:
        """Restore the window from `as_list`; TypeError or ValueError if it is invalid."""
        pushed, pairs = values
        entries = tuple((integer("entry", i), number("amax", x)) for i, x in pairs)
        window = cls(integer("pushed", pushed), entries, entries[0][1] if entries else 0.0)
        numbers, magnitudes = [0, *(i for i, _ in entries)], [math.inf, *(x for _, x in entries)]
        # `push` appends an entry for each iteration, so the last entry has the number `pushed`.
        rising = all(a < b for a, b in zip(numbers, numbers[1:])) and numbers[-1] == window.pushed
        falling = all(a > b for a, b in zip(magnitudes, magnitudes[1:])) and magnitudes[-1] >= 0.0
        if not (rising and falling):
            raise ValueError(f"entries={pairs!r} cannot be those of a window of {pushed} iterations")
        return window


@dataclass(frozen=True)
class HistoryPolicy:
    """Policy of the largest scale that keeps measured gradients a margin below the range's end.

    The meaning of `global_scale="history"` in `AdaptiveLossScalingUpdater`, with custom settings.

    Attributes:
        margin: factor by which a gradient may exceed all in the window before it overflows. Default 4.0.
        window: number of remembered iterations; `measured_every`, if not all are measured. Default 64.
        start_scale: scale of the loss gradient before the first measurement, also out of bounds. Default 8.0.
        min_scale: the lowest scale limit of a component; a loss weight above 1 divides it. Default 2**-24.
        max_scale: the highest scale limit. Default 2**100, whose reciprocal float32 holds, too.

    Raises:
        TypeError: an argument is not a number.
        ValueError: an argument is out of range.

    Example:
        >>> from nnabla_adaloss import HistoryPolicy
        >>> policy = HistoryPolicy()
        >>> policy.scale(1e-3, u_max=65504.0)
        8388608.0
        >>> policy.after_overflow(1024.0)
        64.0
        >>> HistoryPolicy(margin=16.0, window=256).scale(1e-3, u_max=65504.0)
        2097152.0
    """

    margin: float = 4.0
    window: int = 64
    start_scale: float = 8.0
    min_scale: float = 2.0**-24
    max_scale: float = 2.0**100

    def __post_init__(self) -> None:
        if positive_number("margin", self.margin) < 1.0:
            raise ValueError(f"margin={self.margin!r} must be 1 or more")
        positive_integer("window", self.window)
        positive_number("start_scale", self.start_scale)
        if positive_number("min_scale", self.min_scale) > positive_number("max_scale", self.max_scale):
            raise ValueError(
                f"min_scale={self.min_scale!r} must not be larger than max_scale={self.max_scale!r}"
            )

    def measured_every(self, iterations: int) -> HistoryPolicy:
        """Policy for a training that measures once in this many iterations: its `window` is in measurements.

        These are as many as fall into `window` iterations, but at least 16, or `window` if that is less.

        Example:
            >>> from nnabla_adaloss import HistoryPolicy
            >>> [HistoryPolicy(window=256).measured_every(n).window for n in (1, 8, 64)]
            [256, 32, 16]
        """
        window = min(self.window, max(-(-self.window // iterations), _LEAST_MEASUREMENTS))
        return self if window == self.window else _cached_replace(self, window=window)

    def scale(self, amax: float, *, u_max: float) -> float:
        """Scale limit of gradients of at most `amax`, a positive number: a power of two, or a bound."""
        limit = floor_power_of_two(clamp_scale(u_max / self.margin / amax))
        return min(max(limit, self.min_scale), self.max_scale)

    def after_overflow(self, scale: float) -> float:
        """Scale of the next try after `scale` was too large."""
        return min(max(scale / (_STEP * floor_power_of_two(self.margin)), self.min_scale), self.max_scale)

    def amax_of(self, scale: float, *, u_max: float) -> float:
        """Magnitude whose scale limit is `scale`: the inverse of the method `scale`."""
        return u_max / self.margin / scale

    def at_floor(self, scale: float) -> bool:
        """True if a further overflow cannot lower the scale: the cause is not the scale."""
        return scale <= self.min_scale
