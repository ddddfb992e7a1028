# SPDX-License-Identifier: Apache-2.0
"""Monitors for finding faults: a log, and dumps of the layer where a gradient first was not finite."""

from __future__ import annotations

import io
import logging
import os
import re
from typing import Any, List, Sequence, Tuple

import numpy as np

from ..core.layer_record import LayerRecord
from ..core.validation import integer, path_name, positive_integer
from ..state.whole_file import PathLike, replace_file
from .events import BatchRepeated, BatchThrownAway, LayerScaled, Monitor, ScaleChanged

logger = logging.getLogger("nnabla_adaloss")

# Characters of a layer's name, its last, in a file name: each takes up to four bytes of the 255 there.
_KEPT = 50


class LogMonitor(Monitor):
    """Logs to `logging.getLogger("nnabla_adaloss")`: layers and changes of the scale at level INFO, batches
    that are repeated or lost at level WARNING.

    Args:
        level: 0 logs no layers, 1 one line per iteration, written when the next begins, 2 one per layer as
            well. Default 1.
        every: layers are logged in iterations whose number is a multiple of this. Default 1.

    Raises:
        TypeError, ValueError: an argument is not as described.

    Example:
        >>> import logging
        >>> from nnabla_adaloss import LogMonitor
        >>> logging.getLogger("nnabla_adaloss").setLevel(logging.INFO)
        >>> monitors = [LogMonitor(every=100)]    # AdaptiveLossScalingUpdater(..., monitors=monitors)
    """

    looks = False

    def __init__(self, level: int = 1, every: int = 1) -> None:
        if integer("level", level) not in (0, 1, 2):
            raise ValueError(f"level={level!r} must be 0, 1 or 2")
        self.every = positive_integer("every", every)
        self._level = level
        self._records: List[LayerRecord] = []  # of the iteration that is not logged yet

    def on_layer_scaled(self, event: LayerScaled) -> None:
        """Log the previous iteration when a new one begins, and the layer itself at level 2."""
        record, before = event.record, self._records
        if before and before[0].iteration != record.iteration:
            alphas, scales = [one.alpha for one in before], [one.accumulated_scale for one in before]
            message = "iteration %d: %d layers, scales from %g to %g, largest accumulated scale %g"
            logger.info(message, before[0].iteration, len(before), min(alphas), max(alphas), max(scales))
            before.clear()
        if self._level:
            before.append(record)
        if self._level >= 2:
            logger.info(
                "iteration %d, layer %s: scale %g (unbounded %g), accumulated scale %g -> %g, fan-in %g",
                *record[:7],
            )

    def on_batch_repeated(self, event: BatchRepeated) -> None:
        """Log a repeated batch, with the cause."""
        logger.warning("iteration %d, attempt %d: batch repeated: %s%s", *event[:3], _first_bad(event.layers))

    def on_batch_thrown_away(self, event: BatchThrownAway) -> None:
        """Log a lost batch, with the cause."""
        batches = "1 batch is" if event.batches == 1 else f"{event.batches} batches are"
        why = f"{event.cause}{_first_bad(event.layers)}" + (f"; {event.detail}" if event.detail else "")
        logger.warning("iteration %d: %s lost: %s", event.iteration, batches, why)

    def on_scale_changed(self, event: ScaleChanged) -> None:
        """Log the old and the new loss scale."""
        logger.info("iteration %d: loss scale %g -> %g", *event)


def _first_bad(layers: Sequence[str]) -> str:
    return f"; first bad layer: {layers[0]}" if layers else ""


class NanDump(Monitor):
    """Saves the arrays of the first layer, in backward order, whose input gradient holds an infinity or NaN.

    Each file, `iteration-attempt-layer.npz`, holds `output_gradient`, `input_gradient`, `weight` and `input`
    (those still stored), `layer`, `iteration`, `attempt`, `alpha` and `scale`; gradients carry their scale.
    Every pass reads each layer's input gradient once, which costs time: use it for debugging.

    Args:
        path: the folder, created with the first file.
        limit: number of files after which it stops reading gradients. Default 10.

    Attributes:
        files: paths of the written files.

    Raises:
        TypeError, ValueError: `limit` is not a positive integer.

    Example:
        >>> from nnabla_adaloss import NanDump
        >>> monitors = [NanDump("bad_arrays")]    # AdaptiveLossScalingUpdater(..., monitors=monitors)
    """

    def __init__(self, path: PathLike, limit: int = 10) -> None:
        self._folder, self._limit = path_name("path", path), positive_integer("limit", limit)
        self._last: Tuple[int, int] = (-1, -1)
        self.files: List[str] = []

    def on_layer_scaled(self, event: LayerScaled) -> None:
        """Save the layer's arrays if its input gradient is the first that is not finite."""
        record = event.record
        attempt = record.iteration, record.attempt
        if attempt == self._last or len(self.files) >= self._limit:
            return
        seen = event.look.gradient
        if seen is None or not seen.statistics.nonfinite:
            return
        self._last = attempt
        os.makedirs(self._folder, exist_ok=True)
        layer = re.sub(r"[^\w#.-]+", "_", record.layer)[-_KEPT:]
        name = os.path.join(self._folder, f"{record.iteration:08d}-{record.attempt}-{layer}.npz")
        fields: Any = {name: getattr(record, name) for name in ("layer", "iteration", "attempt", "alpha")}
        archive = io.BytesIO()
        np.savez_compressed(archive, scale=record.accumulated_scale, **event.look.arrays(), **fields)
        replace_file(name, archive.getvalue())
        self.files.append(name)
