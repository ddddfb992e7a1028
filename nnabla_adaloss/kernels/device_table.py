# SPDX-License-Identifier: Apache-2.0
"""Results of many kernels, gathered in device memory and fetched with one copy."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional

import numpy as np
from numpy.typing import NDArray

from ..core.statistics import ArrayStatistics
from .cuda_launcher import CudaSource, Launcher
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
    """A table in device memory: so many rows of statistics, with histograms or without, and so many places
    for the largest magnitudes of unscaled gradients.

    `CudaKernels` writes into it without the host waiting; `fetch` waits once for everything.
    """

    def __init__(
        self,
        launcher: Launcher,
        source: CudaSource,
        rows: int,
        histograms: bool = False,
        gradients: int = 0,
    ) -> None:
        self._row = source.layout("Row")
        # Magnitudes first, so that they and the first rows are one piece. The rest has 8 bytes per number.
        self._before_rows = 4 * (gradients + gradients % 2)
        self._before_exponents = self._before_rows + rows * self._row.itemsize
        self._size = self._before_exponents + (rows * EXPONENT_BINS * 8 if histograms else 0)
        self._number_of_rows = rows
        self.histograms = histograms
        self.gradients = gradients
        self._launcher = launcher
        self._memory = launcher.allocate(self._size)
        self.largest, self.rows, self.exponents = (
            np.uint64(self._memory.ptr + offset) for offset in (0, self._before_rows, self._before_exponents)
        )

    def places(self, first: int, count: int) -> range:
        """The places of `count` gradients from `first` on; a ValueError if the table has too few."""
        if first + count > self.gradients:
            raise ValueError(
                f"{count} gradients from place {first} on do not fit into a table for {self.gradients}"
            )
        return range(first, first + count)

    def clear(self) -> None:
        """Empty all rows and reset the magnitudes, without waiting."""
        self._launcher.clear(self._memory, self._size)

    def fetch(self, rows: Optional[int] = None, gradients: Optional[int] = None) -> TableContents:
        """Wait for the kernels launched so far, and copy the table to the host.

        Args:
            rows: only so many, from the first on, for a table without histograms; None for all.
            gradients: only so many of the largest magnitudes; None for all.
        """
        used = self._number_of_rows if rows is None else rows
        end = self._size if self.histograms else self._before_rows + used * self._row.itemsize
        table = self._launcher.fetch(self._memory, end)
        exponents = table[self._before_exponents :].view(np.int64).reshape(-1, EXPONENT_BINS)
        largest = table[: 4 * (self.gradients if gradients is None else gradients)].view(np.float32)
        found = table[self._before_rows : self._before_rows + used * self._row.itemsize].view(self._row)
        return TableContents(_statistics_of(found) if used else [], largest.tolist(), exponents)


def _statistics_of(rows: NDArray[Any]) -> List[RoundingStatistics]:
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
    return [RoundingStatistics(*row) for row in lost]
