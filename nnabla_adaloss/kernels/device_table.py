# SPDX-License-Identifier: Apache-2.0
"""Results of many kernels, gathered in device memory and fetched with one copy."""

from __future__ import annotations

from typing import Any, List, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..core.statistics import ArrayStatistics
from .cuda_launcher import Launcher
from .cuda_source import CudaSource
from .interface import EXPONENT_BINS, RoundingStatistics


class TableContents(NamedTuple):
    """What a `DeviceTable` held when it was fetched.

    Attributes:
        rows: one entry per row; a row that no kernel wrote is that of an empty array.
        largest: the largest magnitude of each unscaled gradient; infinity where it, or what it was added to,
            held an infinity or NaN; 0 where none was unscaled.
        exponents: exponent histograms, shape (rows, 256), or (0, 256) for a table without.
    """

    rows: List[RoundingStatistics]
    largest: List[float]
    exponents: NDArray[np.int64]


class DeviceTable:
    """A table in device memory: a row of statistics per array, and a largest magnitude per unscaled gradient.

    `CudaKernels` writes into it without the host waiting; `fetch` waits once for everything.

    Args:
        launcher: the device.
        source: defines the layout of a row.
        rows: number of rows.
        histograms: whether every row has a histogram of exponents too.
        gradients: number of places for the magnitudes of unscaled gradients.
    """

    def __init__(
        self,
        launcher: Launcher,
        source: CudaSource,
        rows: int,
        histograms: bool = False,
        gradients: int = 0,
    ) -> None:
        fields: List[Any] = [
            ("rows", source.layout("Row"), (rows,)),
            # What follows has 8 bytes per number.
            ("largest", np.uint32, (gradients + gradients % 2,)),
            ("exponents", np.int64, (rows if histograms else 0, EXPONENT_BINS)),
        ]
        self.histograms = histograms
        self.gradients = gradients
        self._launcher = launcher
        self._layout = np.dtype(fields)
        self._memory = launcher.allocate(self._layout.itemsize)
        self.rows, self.largest, self.exponents = (
            np.uint64(self._memory.ptr + np.dtype(fields[:i]).itemsize) for i in range(len(fields))
        )

    def clear(self) -> None:
        """Empty all rows and reset the magnitudes, without waiting."""
        self._launcher.clear(self._memory, self._layout.itemsize)

    def fetch(self) -> TableContents:
        """Wait for the kernels launched so far, and copy the table to the host."""
        table = self._launcher.fetch(self._memory, self._layout.itemsize).view(self._layout)[0]
        rows = table["rows"]
        magnitudes = np.stack([rows["largest"], np.negative(rows["negated_smallest"])]).view(np.float32)
        columns = [
            rows["count"],
            rows["sum"],
            rows["sum_of_squares"],
            *magnitudes,
            rows["zeros"],
            rows["nonfinite"],
        ]
        statistics = [ArrayStatistics(*row) for row in zip(*(column.tolist() for column in columns))]
        lost = zip(statistics, rows["underflowed"].tolist(), rows["overflowed"].tolist())
        return TableContents(
            [RoundingStatistics(*row) for row in lost],
            table["largest"].view(np.float32)[: self.gradients].tolist(),
            table["exponents"],
        )
