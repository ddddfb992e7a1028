# SPDX-License-Identifier: Apache-2.0
"""Recorded training, and queries on it."""

from __future__ import annotations

import csv
import os
from collections import deque
from contextlib import closing
from itertools import chain
from typing import Any, Deque, Dict, Iterable, List, NamedTuple, Optional, Type, TypeVar

from ..core.validation import integer
from ..state.whole_file import PathLike
from .events import BatchThrownAway, Event
from .row_file import read_rows, write_rows
from .rows import LayerRow, points_of
from .tensorboard import TensorBoardFile

_Kind = TypeVar("_Kind")

# Columns of a table of the layers.
_COLUMNS = (*(name for name in LayerRow._fields if name != "exponents"), "underflow", "overflow")


class Underflow(NamedTuple):
    """The underflow of one layer's input gradient.

    Attributes:
        layer: name of the layer.
        since: start of the last stretch of iterations most of which underflowed; a gap or a lost batch does
            not end a stretch.
        until: the last iteration that underflowed; None if that is the last recorded one.
        worst: the largest share of elements lost in one pass.
        last: the share in the last pass.
        share: fraction of the iterations recorded from `since` to `until` that underflowed.
        iterations: number recorded from `since` to `until`.
    """

    layer: str
    since: int
    until: Optional[int]
    worst: float
    last: float
    share: float
    iterations: int


class Recording:
    """Rows of a `Recorder`, or of its file, in chronological order.

    Args:
        rows: the rows.
        limit: number of latest rows to keep; None for all.

    Attributes:
        rows: `TrainingBegan`, `LayerRow`, `Overflowed`, `BatchRepeated`, `BatchThrownAway`, `ScaleChanged`,
            `UpdateEnded`.

    Example:
        >>> from nnabla_adaloss import LayerRow, Recording
        >>> row = LayerRow(7, 0, "fc", 4.0, 32.0, "method", elements=100, zeros=60, underflowed=10)
        >>> recording = Recording([row])
        >>> recording.at("fc", 7).scale
        32.0
        >>> recording.underflows()
        [Underflow(layer='fc', since=7, until=None, worst=0.2, last=0.2, share=1.0, iterations=1)]
    """

    def __init__(self, rows: Iterable[Event] = (), limit: Optional[int] = None) -> None:
        if limit is not None and integer("limit", limit) < 0:
            raise ValueError(f"limit={limit!r} must be 0 or more, or None")
        self.rows: Deque[Event] = deque(rows, limit)

    @classmethod
    def load(cls, path: PathLike) -> Recording:
        """Read the file of a `Recorder(path)`, also while it is being written, or after a crash.

        A truncated last line is skipped. Iterations that ran twice, because a training resumed from a
        checkpoint, appear once.

        Raises:
            ValueError: the file is not a recording, of a newer version, or damaged before its end.
        """
        return cls(read_rows(path))

    def of(self, kind: Type[_Kind]) -> List[_Kind]:
        """Rows of one kind: `recording.of(Overflowed)`."""
        return [row for row in self.rows if isinstance(row, kind)]

    @property
    def layers(self) -> List[str]:
        """Names of the layers, in backward order."""
        return list(dict.fromkeys(row.layer for row in self.of(LayerRow)))

    def by_layer(self) -> Dict[str, List[LayerRow]]:
        """Rows of each layer: of each iteration the last pass, whose gradients the update used."""
        layers: Dict[str, Dict[int, LayerRow]] = {}
        for row in self.of(LayerRow):
            layers.setdefault(row.layer, {})[row.iteration] = row
        return {layer: list(rows.values()) for layer, rows in layers.items()}

    def of_layer(self, layer: str) -> List[LayerRow]:
        """The rows of one layer, as `by_layer` has them; KeyError if no layer of this name was recorded."""
        rows = self.by_layer().get(layer)
        if rows is None:
            known = ", ".join(self.layers) or "none"
            raise KeyError(f"no layer {layer!r} was recorded; there are {known}")
        return rows

    def at(self, layer: str, iteration: int) -> LayerRow:
        """Row of a layer's last pass up to the end of an iteration; KeyError if none was recorded."""
        rows = self.of_layer(layer)
        for row in reversed(rows):
            if row.iteration <= iteration:
                return row
        raise KeyError(f"{layer!r} was recorded from iteration {rows[0].iteration} on, not in {iteration}")

    def underflows(self, above: float = 0.01) -> List[Underflow]:
        """Layers whose input gradients lose more than a share of their elements, the worst first.

        Args:
            above: the share of nonzero elements that become zero when stored. Default 0.01. Layers whose
                storage does not count underflow are left out.
        """
        underflows = (_underflow(rows, above) for rows in self.by_layer().values())
        return sorted((u for u in underflows if u is not None), key=lambda u: -u.worst)

    def lost_batches(self) -> Dict[str, int]:
        """Number of lost batches, by cause."""
        lost: Dict[str, int] = {}
        for row in self.of(BatchThrownAway):
            lost[row.cause] = lost.get(row.cause, 0) + row.batches
        return lost

    def to_json_lines(self, path: PathLike) -> None:
        """Write all rows as JSON lines, which `load` and `python -m nnabla_adaloss report` read."""
        write_rows(path, self.rows)

    def to_csv(self, path: PathLike) -> None:
        """Write the layers as a table with a line for each layer and pass."""
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(_COLUMNS)
            writer.writerows([getattr(row, name) for name in _COLUMNS] for row in self.of(LayerRow))

    def to_pandas(self) -> Any:
        """The layers as a `pandas.DataFrame`, a row for each layer and pass; ImportError without pandas."""
        try:
            import pandas
        except ImportError:
            raise ImportError("to_pandas() needs pandas: pip install 'nnabla-adaloss[monitor]'") from None
        rows = self.of(LayerRow)
        return pandas.DataFrame({name: [getattr(row, name) for row in rows] for name in _COLUMNS})

    def to_monitor_series(self, path: PathLike) -> None:
        """Write each curve over the iterations to a folder, as a file of nnabla's `MonitorSeries`."""
        from nnabla.monitor import Monitor, MonitorSeries

        # The last pass of an iteration counts.
        others = (row for row in self.rows if not isinstance(row, LayerRow))
        curves: Dict[str, Dict[int, float]] = {}
        for row in chain(others, *self.by_layer().values()):
            for name, value in points_of(row).items():
                curves.setdefault(name, {})[row.iteration] = value
        monitor = Monitor(os.fsdecode(path))
        for name, values in curves.items():
            series = MonitorSeries(name.replace("/", "."), monitor, interval=1, verbose=False)
            for iteration, value in values.items():
                series.add(iteration, value)

    def to_tensorboard(self, path: PathLike) -> None:
        """Write the event file of `Recorder(tensorboard=path)`; ImportError without tensorboardX."""
        with closing(TensorBoardFile(path)) as file:
            for row in self.rows:
                file.append_row(row)


def _underflow(rows: List[LayerRow], above: float) -> Optional[Underflow]:
    """Describe the underflow of a layer; None if no share of it exceeds `above`."""
    shares = [(row.iteration, row.underflow) for row in rows if row.underflow is not None]
    bad = [index for index, (_, share) in enumerate(shares) if share > above]
    if not bad:
        return None
    # The longest stretch up to the last bad iteration in which more than half are bad.
    most = max(n for n in range(1, len(bad) + 1) if 2 * n > bad[-1] - bad[-n] + 1)
    first, last = bad[-most], bad[-1]
    return Underflow(
        rows[-1].layer,
        since=shares[first][0],
        until=None if last == len(shares) - 1 else shares[last][0],
        worst=max(share for _, share in shares),
        last=shares[-1][1],
        share=most / (last - first + 1),
        iterations=last - first + 1,
    )
