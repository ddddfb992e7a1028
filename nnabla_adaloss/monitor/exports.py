# SPDX-License-Identifier: Apache-2.0
"""Recordings in other formats: tables, and nnabla's series."""

from __future__ import annotations

import csv
import os
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

from .events import BatchThrownAway, ScaleChanged, UpdateEnded
from .row_file import PathLike
from .rows import LayerRow, Row

_COLUMNS = (*(name for name in LayerRow._fields if name != "exponents"), "underflow", "overflow")
_CURVES = (
    *("alpha", "scale", "underflow", "overflow", "nonfinite", "headroom"),
    *("weight_max", "weight_subnormal", "input_max", "input_subnormal"),
)


class Point(NamedTuple):
    """One point of a curve.

    Attributes:
        name: which curve: `conv/scale`, or `loss`.
        iteration: number of the iteration.
        value: its value.
    """

    name: str
    iteration: int
    value: float


def points_of(row: Row) -> List[Point]:
    """Everything in a row that can be drawn over iterations."""
    if isinstance(row, LayerRow):
        known = ((name, getattr(row, name)) for name in _CURVES)
        return [Point(f"{row.layer}/{name}", row.iteration, float(v)) for name, v in known if v is not None]
    if isinstance(row, UpdateEnded):
        values = {"loss": row.loss, "retries": row.retries, "loss_scale": row.scale}
        return [Point(name, row.iteration, float(value)) for name, value in values.items()]
    if isinstance(row, ScaleChanged):
        return [Point("loss_scale", row.iteration, row.after)]
    if isinstance(row, BatchThrownAway):
        return [Point("batches_lost", row.iteration, float(row.batches))]
    return []


def loss_scales(rows: Sequence[Row]) -> List[Tuple[int, float]]:
    """Iterations and the global loss scale S0 after them, wherever it is known."""
    found: Dict[int, float] = {}
    for row in rows:
        if isinstance(row, UpdateEnded):
            found[row.iteration] = row.scale
        elif isinstance(row, ScaleChanged):
            found[row.iteration] = row.after
    return list(found.items())


def table(rows: Sequence[LayerRow]) -> Dict[str, List[Any]]:
    """The rows by column; None for what is not known."""
    return {name: [getattr(row, name) for row in rows] for name in _COLUMNS}


def write_csv(path: PathLike, rows: Sequence[LayerRow]) -> None:
    """Write a table with a line for each row; fields that are not known are empty."""
    columns = table(rows)
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values()))


def data_frame(rows: Sequence[LayerRow]) -> Any:
    """The table as a `pandas.DataFrame`.

    Raises:
        ImportError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError:
        raise ImportError("to_pandas() needs pandas: pip install 'nnabla-adaloss[monitor]'") from None
    return pandas.DataFrame(table(rows))


def write_monitor_series(path: PathLike, points: Sequence[Point]) -> None:
    """Write each curve as an `nnabla.monitor.MonitorSeries`; a slash in its name becomes a dot.

    Of several points of one curve and iteration, the last one is written.
    """
    from nnabla.monitor import Monitor, MonitorSeries

    monitor, series = Monitor(os.fsdecode(path)), {}
    values = {(name, iteration): value for name, iteration, value in points}
    for (name, iteration), value in values.items():
        if name not in series:
            series[name] = MonitorSeries(name.replace("/", "."), monitor, interval=1, verbose=False)
        series[name].add(iteration, value)
