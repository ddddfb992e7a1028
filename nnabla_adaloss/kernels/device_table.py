# SPDX-License-Identifier: Apache-2.0
"""Results of many kernels, gathered in device memory and fetched with one copy."""

from __future__ import annotations

from typing import Any, List, Optional, Tuple

import numpy as np
from numpy.typing import NDArray

from ..core.statistics import ArrayStatistics
from .cuda_launcher import CudaSource, CupyLauncher
from .interface import RoundingStatistics


class DeviceTable:
    """A table in device memory: so many rows of statistics, and so many places for the largest magnitudes of
    unscaled gradients.

    `CudaKernels` writes into it without the host waiting; `fetch` waits once for everything.
    """

    def __init__(self, launcher: CupyLauncher, source: CudaSource, rows: int, gradients: int = 0) -> None:
        self._row = source.layout("Row")
        # Magnitudes first, so that they and the first rows are one piece. The rest has 8 bytes per number.
        self._before_rows = 4 * (gradients + gradients % 2)
        self._size = self._before_rows + rows * self._row.itemsize
        self._number_of_rows, self._gradients = rows, gradients
        self._launcher = launcher
        self._memory = launcher.allocate(self._size)
        self.largest = np.uint64(self._memory.ptr)
        self.rows = np.uint64(self._memory.ptr + self._before_rows)

    def clear(self) -> None:
        """Empty all rows and reset the magnitudes, without waiting."""
        self._launcher.clear(self._memory, self._size)

    def fetch(
        self, rows: Optional[int] = None, gradients: Optional[int] = None
    ) -> Tuple[List[RoundingStatistics], List[float]]:
        """Wait for the kernels launched so far, and copy the first rows and places to the host; None: all.

        A row that no kernel wrote is that of an empty array, such a place 0. The place of a gradient has what
        `Kernels.unscale_add` returns.
        """
        rows = self._number_of_rows if rows is None else rows
        gradients = self._gradients if gradients is None else gradients
        table = self._launcher.fetch(self._memory, self._before_rows + rows * self._row.itemsize)
        largest = table[: 4 * gradients].view(np.float32)
        found = table[self._before_rows :].view(self._row)
        return _statistics_of(found) if rows else [], largest.tolist()


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
