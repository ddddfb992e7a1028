# SPDX-License-Identifier: Apache-2.0
"""Event file of TensorBoard with a recording's rows, during a training or afterwards."""

from __future__ import annotations

import math
import os
import socket
import struct
import time
from typing import Any, Dict, List

from ..state.whole_file import PathLike
from .events import Event, Overflowed, TrainingBegan, UpdateEnded
from .row_file import AppendedFile
from .rows import LayerRow, points_of


class TensorBoardFile:
    """Writes rows to a new event file in a folder; of each layer only the last pass of each iteration."""

    # tensorboardX's own writer is not used: its thread blocks a training forever on a full disk.

    def __init__(self, path: PathLike) -> None:
        try:
            from tensorboardX import record_writer, summary
            from tensorboardX.proto import event_pb2
        except ImportError:
            raise ImportError(
                "writing for TensorBoard needs tensorboardX: pip install 'nnabla-adaloss[monitor]'"
            ) from None
        self._summary, self._event, self._checksum = summary, event_pb2.Event, record_writer.masked_crc32c
        self._last_passes: Dict[str, LayerRow] = {}
        self._iteration = -1
        folder = os.fsdecode(path)
        os.makedirs(folder, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._file = AppendedFile(os.path.join(folder, name))
        self.name = self._file.name
        self._file.append(self._record(file_version="brain.Event:2"))

    def append_row(self, row: Event) -> None:
        """Write a row, at the latest with the next iteration."""
        over = row.iteration != self._iteration or isinstance(row, UpdateEnded)
        records = self._of_layers() if over else []
        self._iteration = row.iteration
        if isinstance(row, LayerRow):
            self._last_passes[row.layer] = row
        else:
            records += self._records(row)
        self._file.append(b"".join(records))

    def close(self) -> None:
        """Write the remaining rows and close the file; may be called twice."""
        try:
            if self._last_passes:
                self._file.append(b"".join(self._of_layers()))
        finally:
            self._file.close()

    def _of_layers(self) -> List[bytes]:
        """Records of the layers of the iteration that has ended."""
        rows, self._last_passes = self._last_passes.values(), {}
        return [record for row in rows for record in self._records(row)]

    def _records(self, row: Event) -> List[bytes]:
        """Records of a row: its points on curves, which must be finite, its histogram, and texts."""
        write, points = self._summary, points_of(row).items()
        values = [write.scalar(name, value) for name, value in points if math.isfinite(value)]
        if isinstance(row, LayerRow) and row.exponents:
            values.append(write.histogram_raw(f"{row.layer}/exponents", **_histogram(row.exponents)))
        if isinstance(row, TrainingBegan):
            lines = [f"{name} = {value}" for name, value in {"date": row.date, **row.settings}.items()]
            values.append(write.text("settings", "  \n".join(lines)))
        if isinstance(row, Overflowed):
            first = row.layers[0] if row.layers else "unknown"
            text = f"{row.cause}, first bad layer {first}, loss scale {row.scale:g}"
            values.append(write.text("overflows", text))
        return [self._record(summary=value, step=row.iteration) for value in values]

    def _record(self, **fields: Any) -> bytes:
        """Serialize an event for an event file: length, checksum of the length, event, its checksum."""
        event: bytes = self._event(wall_time=time.time(), **fields).SerializeToString()
        length = struct.pack("<Q", len(event))
        checksums = [struct.pack("<I", self._checksum(part)) for part in (length, event)]
        return length + checksums[0] + event + checksums[1]


def _histogram(exponents: List[int]) -> Dict[str, Any]:
    """Histogram of binary exponents in TensorBoard's form, each exponent in the middle of its bin."""
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
