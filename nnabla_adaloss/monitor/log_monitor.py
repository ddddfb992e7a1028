# SPDX-License-Identifier: Apache-2.0
"""A monitor that writes to the log."""

from __future__ import annotations

import logging
from typing import Sequence

from ..core.layer_record import LayerObserver
from ..core.validation import integer, positive_integer
from .audience import Monitor
from .events import BatchRepeated, BatchThrownAway, LayerScaled, ScaleChanged

logger = logging.getLogger("nnabla_adaloss")


class LogMonitor(Monitor):
    """Writes to `logging.getLogger("nnabla_adaloss")` what happens: layers and changes of the scale at level
    INFO, batches that are repeated or lost at level WARNING.

    What it says of layers is what `AdaLossConfig(debug_level=...)` says, of every nth iteration.

    Args:
        level: 0 for nothing about layers, 1 for one line per iteration, written when the next begins, 2 for
            one per layer as well. 1.
        every: layers are written about in iterations whose number is a multiple of this. 1.

    Raises:
        TypeError, ValueError: an argument is not as described.

    Example:
        >>> import logging
        >>> from nnabla_adaloss import LogMonitor
        >>> logging.getLogger("nnabla_adaloss").setLevel(logging.INFO)
        >>> monitors = [LogMonitor(every=100)]    # AdaptiveLossScalingUpdater(..., monitors=monitors)
    """

    def __init__(self, level: int = 1, every: int = 1) -> None:
        if integer("level", level) not in (0, 1, 2):
            raise ValueError(f"level={level!r} must be 0, 1 or 2")
        self.every = positive_integer("every", every)
        self._log = LayerObserver(None, level)

    def on_layer_scaled(self, event: LayerScaled) -> None:
        """Write about a layer, or keep it for the line about its iteration."""
        self._log(event.record)

    def on_batch_repeated(self, event: BatchRepeated) -> None:
        """Write why."""
        logger.warning("iteration %d, attempt %d: batch repeated: %s%s", *event[:3], _first_of(event.layers))

    def on_batch_thrown_away(self, event: BatchThrownAway) -> None:
        """Write why."""
        batches = "1 batch is" if event.batches == 1 else f"{event.batches} batches are"
        why = f"{event.cause}{_first_of(event.layers)}" + (f"; {event.detail}" if event.detail else "")
        logger.warning("iteration %d: %s lost: %s", event.iteration, batches, why)

    def on_scale_changed(self, event: ScaleChanged) -> None:
        """Write it."""
        logger.info("iteration %d: loss scale %g -> %g", *event)


def _first_of(layers: Sequence[str]) -> str:
    return f"; first bad layer: {layers[0]}" if layers else ""
