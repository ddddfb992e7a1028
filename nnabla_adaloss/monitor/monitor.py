# SPDX-License-Identifier: Apache-2.0
"""What a monitor is: an object with methods for the kinds of events it wants."""

from __future__ import annotations

from .events import BatchRepeated, BatchThrownAway, LayerScaled, Overflowed, ScaleChanged, UpdateEnded


class Monitor:
    """Methods that do nothing: override those whose events you want.

    Any object with some of these methods is a monitor, of this class or not. What a monitor raises is
    reported once, and training goes on.

    Attributes:
        every: `on_layer_scaled` and `on_update_ended` are called in iterations whose number is a multiple of
            this. In the others they cost nothing. 1. Other methods are called at every event.

    Example:
        >>> class Losses(Monitor):
        ...     every = 10
        ...     def __init__(self):
        ...         self.seen = []
        ...     def on_update_ended(self, event):
        ...         self.seen.append(event.loss)
    """

    every: int = 1

    def on_layer_scaled(self, event: LayerScaled) -> None:
        """A layer's backward ran with a scale of its own; several times per iteration if batches repeat."""

    def on_overflowed(self, event: Overflowed) -> None:
        """Gradients were not finite after a pass."""

    def on_batch_repeated(self, event: BatchRepeated) -> None:
        """A batch is going to be run again."""

    def on_batch_thrown_away(self, event: BatchThrownAway) -> None:
        """A batch, or a window of them, was lost."""

    def on_scale_changed(self, event: ScaleChanged) -> None:
        """The global loss scale is another one than before the update."""

    def on_update_ended(self, event: UpdateEnded) -> None:
        """An update is over."""
