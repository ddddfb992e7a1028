# SPDX-License-Identifier: Apache-2.0
"""Why gradients are not finite: what all ranks agree on."""

from __future__ import annotations

from typing import NamedTuple

from ..engine import AdaptiveLossScaling
from .exchange import GradientExchange
from .window import Window


class Cause(NamedTuple):
    """What all ranks take for the cause.

    Attributes:
        nonfinite_loss: the loss of a rank was not finite.
        nonfinite_forward: something else in forward was not, in a way that no scale mends.
        at_floor: no scale helped a batch.
        exhausted: a batch was repeated as often as may be.
        global_scale: only S0 is left to be lowered.
    """

    nonfinite_loss: bool
    nonfinite_forward: bool
    at_floor: bool
    exhausted: bool
    global_scale: bool

    @property
    def bad_batch(self) -> bool:
        """Whether no scale was at fault."""
        return self.nonfinite_loss or self.nonfinite_forward

    @property
    def word(self) -> str:
        """The cause in a word, as counters and events have it."""
        if self.bad_batch:
            return "nonfinite_loss" if self.nonfinite_loss else "nonfinite_forward"
        if self.at_floor:
            return "hopeless"
        return "retries" if self.exhausted else "overflow"


def agree_on_cause(
    exchange: GradientExchange, window: Window, scaling: AdaptiveLossScaling, *, repeat: bool
) -> Cause:
    """Ask all ranks for the cause; layers that are to blame are lowered on each.

    Args:
        exchange: asks the others.
        window: what happened on this rank.
        scaling: its layers.
        repeat: whether ranks have repeated batches by themselves, and lowered layers already.
    """
    layers = [] if repeat else scaling.layers
    blame = None if window.lowered else window.layer_to_blame
    unexplained = window.overflowed and blame is None and not window.lowered and not repeat
    flags = [window.nonfinite_loss, window.fault is not None, window.at_floor, window.exhausted]
    *agreed, lowered, global_scale = exchange.any(
        [*flags, *(layer == blame for layer in layers), window.lowered, unexplained]
    )
    nonfinite_loss, nonfinite_forward, at_floor, exhausted, *blamed = agreed
    if not (nonfinite_loss or nonfinite_forward or global_scale):
        for layer, flag in zip(layers, blamed):
            if flag:
                scales = window.layer_scales or scaling.layer_scales
                scaling.back_off(layer, scales.get(layer, 1.0))
    # The sum over ranks may overflow where no rank's own gradients did.
    explained = any(blamed) or lowered or at_floor or exhausted
    return Cause(nonfinite_loss, nonfinite_forward, at_floor, exhausted, global_scale or not explained)
