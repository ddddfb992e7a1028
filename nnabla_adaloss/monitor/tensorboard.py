# SPDX-License-Identifier: Apache-2.0
"""Rows in an event file of TensorBoard, while a training runs or afterwards."""

from __future__ import annotations

import math
import os
from typing import Any, Dict, List

from .events import Overflowed, TrainingBegan, UpdateEnded
from .row_file import PathLike
from .rows import LayerRow, Row, points_of

_SECONDS = 10  # until what was written can be seen


class TensorBoardFile:
    """Writes rows to a new event file in a folder: of a layer, the last pass of an iteration that is over."""

    def __init__(self, path: PathLike) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise ImportError(
                "writing for TensorBoard needs tensorboardX: pip install 'nnabla-adaloss[monitor]'"
            ) from None
        self._writer: Any = SummaryWriter(os.fsdecode(path), flush_secs=_SECONDS)
        self._last_passes: Dict[str, LayerRow] = {}
        self._iteration = -1

    def append(self, row: Row) -> None:
        """Write a row, at the latest with the next iteration."""
        if self._writer is None:
            raise ValueError("the event file for TensorBoard is closed")
        if row.iteration != self._iteration:
            self._write_layers()
            self._iteration = row.iteration
        if isinstance(row, LayerRow):
            self._last_passes[row.layer] = row
            return
        if isinstance(row, UpdateEnded):
            self._write_layers()
        self._write_points(row)
        if isinstance(row, TrainingBegan):
            lines = [f"{name} = {value}" for name, value in {"date": row.date, **row.settings}.items()]
            self._writer.add_text("settings", "  \n".join(lines), row.iteration)
        if isinstance(row, Overflowed):
            first = row.layers[0] if row.layers else "unknown"
            text = f"{row.cause}, first bad layer {first}, loss scale {row.scale:g}"
            self._writer.add_text("overflows", text, row.iteration)

    def close(self) -> None:
        """Write what is left, and close the file; harmless when it is closed."""
        if self._writer is not None:
            self._write_layers()
            self._writer.close()
            self._writer = None

    def _write_layers(self) -> None:
        for row in self._last_passes.values():
            self._write_points(row)
            if row.exponents:
                self._writer.add_histogram_raw(
                    f"{row.layer}/exponents", **_histogram(row.exponents), global_step=row.iteration
                )
        self._last_passes.clear()

    def _write_points(self, row: Row) -> None:
        for name, value in points_of(row).items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, row.iteration)


def _histogram(exponents: List[int]) -> Dict[str, Any]:
    """A histogram of binary exponents as TensorBoard takes it: an exponent lies in the middle of its bin."""
    first, *counts = exponents
    present = range(first, first + len(counts))
    return {
        "min": float(first),
        "max": float(present[-1]),
        "num": sum(counts),
        "sum": float(sum(e * n for e, n in zip(present, counts))),
        "sum_squares": float(sum(e * e * n for e, n in zip(present, counts))),
        "bucket_limits": [e + 0.5 for e in present],
        "bucket_counts": counts,
    }
