# SPDX-License-Identifier: Apache-2.0
"""A monitor that keeps the arrays of a layer whose gradient is not finite."""

from __future__ import annotations

import io
import os
import re
from typing import List, Tuple

import numpy as np

from ..core.validation import path_name, positive_integer
from ..state.whole_file import PathLike, replace_file
from .audience import Monitor
from .events import LayerScaled

_LONGEST = 50  # characters of a layer's name; each takes up to four bytes, and names of files may have 255


class NanDump(Monitor):
    """Saves the arrays of the first layer, in backward order, whose input gradient holds an infinity or NaN.

    A file each, `iteration-attempt-layer.npz`, with `output_gradient`, `input_gradient`, `weight` and `input`
    (where they still are), `layer`, `iteration`, `attempt`, `alpha` and `scale`; gradients carry their scale.
    Each layer's input gradient is read once in each pass for that, so use it to look for a fault.

    Args:
        path: the folder; it is made when the first file is.
        limit: how many files are written; then it looks no more. 10.

    Attributes:
        files: the files that were written.

    Raises:
        TypeError, ValueError: `limit` is no positive integer.

    Example:
        >>> from nnabla_adaloss import NanDump
        >>> monitors = [NanDump("bad_arrays")]    # AdaptiveLossScalingUpdater(..., monitors=monitors)
    """

    def __init__(self, path: PathLike, limit: int = 10) -> None:
        self._folder, self._limit = path_name("path", path), positive_integer("limit", limit)
        self._last: Tuple[int, int] = (-1, -1)
        self.files: List[str] = []

    def on_layer_scaled(self, event: LayerScaled) -> None:
        """Save the arrays of a layer, if they are wanted."""
        record = event.record
        attempt = record.iteration, record.attempt
        if attempt == self._last or len(self.files) >= self._limit:
            return
        seen = event.look.gradient
        if seen is None or not seen.statistics.nonfinite:
            return
        self._last = attempt
        os.makedirs(self._folder, exist_ok=True)
        layer = re.sub(r"[^\w#.-]+", "_", record.layer)[-_LONGEST:]
        name = os.path.join(self._folder, f"{record.iteration:08d}-{record.attempt}-{layer}.npz")
        saved = {name: array for name, array in event.look.arrays()._asdict().items() if array is not None}
        saved.update({name: getattr(record, name) for name in ("layer", "iteration", "attempt", "alpha")})
        archive = io.BytesIO()
        np.savez_compressed(archive, scale=record.accumulated_scale, **saved)
        replace_file(name, archive.getvalue())
        self.files.append(name)
