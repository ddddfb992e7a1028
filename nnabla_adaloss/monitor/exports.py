# SPDX-License-Identifier: Apache-2.0
"""Recordings in the formats of others: tables, nnabla's series, TensorBoard."""

from __future__ import annotations

import csv
import math
import os
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

from .events import ScaleChanged, UpdateEnded
from .row_file import PathLike
from .rows import LayerRow, Row

_COLUMNS = (*(name for name in LayerRow._fields if name != "exponents"), "underflow", "overflow")
_CURVES = ("alpha", "scale", "underflow", "overflow", "headroom")


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


def points(layers: Sequence[LayerRow], rows: Sequence[Row]) -> List[Point]:
    """Everything that can be drawn over iterations.

    Args:
        layers: one row for each layer and iteration.
        rows: all rows.
    """
    found = [
        Point(f"{row.layer}/{name}", row.iteration, float(getattr(row, name)))
        for row in layers
        for name in _CURVES
        if getattr(row, name) is not None
    ]
    for row in rows:
        if isinstance(row, UpdateEnded):
            found += [Point("loss", row.iteration, row.loss), Point("retries", row.iteration, row.retries)]
    return found + [Point("loss_scale", *pair) for pair in loss_scales(rows)]


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


def write_monitor_series(path: PathLike, curves: Sequence[Point]) -> None:
    """Write each curve as an `nnabla.monitor.MonitorSeries`; a slash in its name becomes a dot."""
    from nnabla.monitor import Monitor, MonitorSeries

    monitor, series = Monitor(os.fsdecode(path)), {}
    for name, iteration, value in curves:
        if name not in series:
            series[name] = MonitorSeries(name.replace("/", "."), monitor, interval=1, verbose=False)
        series[name].add(iteration, value)


def write_tensorboard(path: PathLike, curves: Sequence[Point], layers: Sequence[LayerRow]) -> None:
    """Write curves and histograms as an event file of TensorBoard.

    Raises:
        ImportError: tensorboardX is not installed.
    """
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise ImportError(
            "to_tensorboard() needs tensorboardX: pip install 'nnabla-adaloss[monitor]'"
        ) from None
    with SummaryWriter(os.fsdecode(path)) as writer:
        for name, iteration, value in curves:
            if math.isfinite(value):
                writer.add_scalar(name, value, iteration)
        for row in layers:
            if row.exponents:
                writer.add_histogram_raw(
                    f"{row.layer}/exponents", **_histogram(row.exponents), global_step=row.iteration
                )


def _histogram(exponents: Sequence[int]) -> Dict[str, Any]:
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
