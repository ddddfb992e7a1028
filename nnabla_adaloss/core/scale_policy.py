# SPDX-License-Identifier: Apache-2.0
"""Reactions of the global loss scale S0 to overflows and to good updates.

    after an overflow:  scale = scale / scaling_factor;  counter = 0;  try again
    after an update:    if counter > N:  scale = scale * scaling_factor;  counter = 0
                        counter = counter + 1

The defaults equal nnabla's `DynamicLossScalingUpdater`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .validation import integer, limited, nonnegative_integer, number, positive_integer, positive_number

# The smallest normal float32: gradients are unscaled in float32, where 1 / scale may be infinite below it.
SMALLEST_SCALE = 2.0**-126

# Checks of arguments, like those of `validation`.
global_scale = limited(
    positive_number,
    lambda scale: scale >= SMALLEST_SCALE,
    "is too small to unscale gradients in float32: it must be 2**-126 or more",
)
growth_factor = limited(positive_number, lambda factor: factor >= 1.0, "must be 1 or more")


class ScaleState(NamedTuple):
    """State of the global loss scale."""

    scale: float  # S0
    counter: int  # good updates since the last overflow or growth, as nnabla counts them
    hysteresis_left: int  # number of overflows in a row until one lowers the scale; 1: the next one does


@dataclass(frozen=True)
class ScalePolicy:
    """Transitions of the global loss scale, which never move it further out of [min_scale, max_scale]."""

    scaling_factor: float = 2.0  # factor of the scale's changes, 1 or more; 1 keeps it constant
    N: float = 2000  # it grows after more than this many successful updates in a row; math.inf: never
    min_scale: float = 2.0**-24  # the smallest positive float16: below, the loss gradient itself underflows
    max_scale: float = 2.0**64  # far beyond use, and far from float32's limit
    hysteresis: int = 1  # the n-th overflow in a row, and each after it, lowers the scale

    def __post_init__(self) -> None:
        growth_factor("scaling_factor", self.scaling_factor)
        if not number("N", self.N) >= 0:
            raise ValueError(f"N={self.N!r} must be 0 or more; math.inf never grows the scale")
        if global_scale("min_scale", self.min_scale) > positive_number("max_scale", self.max_scale):
            raise ValueError(
                f"min_scale={self.min_scale!r} must not be larger than max_scale={self.max_scale!r}"
            )
        positive_integer("hysteresis", self.hysteresis)

    def initial(self, scale: float) -> ScaleState:
        """Make the initial state; ValueError unless `scale` is finite, and 2**-126 or more."""
        return ScaleState(global_scale("scale", scale), 0, self.hysteresis)

    def checked(self, state: ScaleState) -> ScaleState:
        """Convert the numbers of a state to float and int; ValueError or TypeError if one is out of range."""
        # A scale out of [min_scale, max_scale] is valid: training may have begun with it.
        counter = nonnegative_integer("counter", state.counter)
        hysteresis_left = integer("hysteresis_left", state.hysteresis_left)
        if not 1 <= hysteresis_left <= self.hysteresis:
            raise ValueError(f"hysteresis_left={state.hysteresis_left!r} must lie in [1, {self.hysteresis}]")
        return ScaleState(global_scale("scale", state.scale), counter, hysteresis_left)

    def after_overflow(self, state: ScaleState) -> ScaleState:
        """State after gradients with an infinity or a NaN."""
        if state.hysteresis_left > 1:
            return ScaleState(state.scale, 0, state.hysteresis_left - 1)
        lowest = min(self.min_scale, state.scale)
        return ScaleState(max(state.scale / self.scaling_factor, lowest), 0, state.hysteresis_left)

    def after_update(self, state: ScaleState, *, overflowed: bool = False) -> ScaleState:
        """State after a good update; if one of its batches `overflowed`, it does not reset the hysteresis."""
        hysteresis_left = state.hysteresis_left if overflowed else self.hysteresis
        if state.counter <= self.N:
            return ScaleState(state.scale, state.counter + 1, hysteresis_left)
        highest = max(self.max_scale, state.scale)
        return ScaleState(min(state.scale * self.scaling_factor, highest), 1, hysteresis_left)

    def at_floor(self, state: ScaleState) -> bool:
        """True if a further overflow cannot lower the scale: the cause is not the scale."""
        return state.scale <= self.min_scale or self.scaling_factor == 1.0
