# SPDX-License-Identifier: Apache-2.0
"""Arguments of a launch of CUDA kernels, and the table in device memory with their results."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple, Union

import numpy as np
from numpy.typing import NDArray

from ..core.statistics import ArrayStatistics
from .addresses import Addresses
from .cuda_launcher import CupyLauncher, layout
from .interface import RoundingStatistics

Column = Union[float, Sequence[float], NDArray[Any]]
"""A number for each task, or one for all."""


class DeviceTasks:
    """Columns of adaloss.cu's Task, ten times as fast to write as single tasks; reusable after `move`."""

    # Sources and targets are addresses, 0 for no target; rows are places of results in a table. Tasks share
    # launches: none may access an array that another one writes.

    def __init__(
        self,
        sources: Addresses,
        targets: Column,
        sizes: Column,
        *,
        rows: Column = 0,
        factors: Column = 1.0,
        flags: Column = 0,
    ) -> None:
        self.count = count = len(sources)
        self.sizes_and_rows: Any = (sizes, rows)  # as given, to compare before `move`
        self._sizes, self._rows = (_column(values, np.int64, count) for values in (sizes, rows))
        self._factors = _column(factors, np.float64, count)
        # Argument of a launch, without addresses and flags, and its number of blocks, by the part's start and
        # stop alone: a kernel's `per_block` and `max_blocks` are always the same.
        self._launches: Dict[Tuple[int, int], Tuple[NDArray[Any], int]] = {}
        self.move(sources, targets, flags)

    def move(self, sources: Addresses, targets: Column, flags: Column = 0) -> None:
        """Set the addresses and flags of the next launches."""
        self._sources, self._targets, self._flags = (
            _column(values, np.int64, self.count) for values in (sources, targets, flags)
        )

    def argument(self, part: slice, per_block: int, max_blocks: int) -> Tuple[NDArray[Any], int]:
        """Struct `Tasks` of adaloss.cu for a part of the tasks, and its number of blocks."""
        # In an array of one element that the next call fills again: a launch copies it.
        place, count = (part.start, part.stop), part.stop - part.start
        if place not in self._launches:
            new, sizes = np.zeros(1, layout("Tasks")), self._sizes[part]
            new["count"] = count
            task = new["task"][0, :count]
            task["size"], task["row"], task["factor"] = sizes, self._rows[part], self._factors[part]
            # Half the time of np.clip: tasks that are not kept are made in each iteration.
            counts = np.minimum(np.maximum(-(-sizes // per_block), 1), max_blocks)
            ends = counts.cumsum()
            task["first_block"] = ends - counts
            self._launches[place] = new, int(ends[-1])
        argument, blocks = self._launches[place]
        task = argument["task"][0, :count]
        task["source"], task["target"] = self._sources[part], self._targets[part]
        task["flags"] = self._flags[part]
        return argument, blocks


def _column(values: Column, dtype: Any, count: int) -> NDArray[Any]:
    """Array of a column, for `count` tasks."""
    if not isinstance(values, (int, float)):
        return np.asarray(values, dtype)
    column = np.zeros(count, dtype)
    if values:
        column.fill(values)
    return column


class DeviceTable:
    """Rows of statistics and places of largest magnitudes on the device; only `fetch` waits for kernels."""

    def __init__(self, launcher: CupyLauncher, rows: int, gradients: int = 0) -> None:
        self._row = layout("Row")
        # Magnitudes first, so that one copy covers them and the first rows. Rows have 8 bytes per number.
        self._before_rows = 4 * (gradients + gradients % 2)
        self._size = self._before_rows + rows * self._row.itemsize
        self._launcher = launcher
        self._memory = launcher.allocate(self._size)
        self.largest = np.uint64(self._memory.ptr)
        self.rows = np.uint64(self._memory.ptr + self._before_rows)

    def clear(self) -> None:
        """Empty all rows and reset the magnitudes, without waiting."""
        self._launcher.clear(self._memory, self._size)

    def fetch(self, rows: int, gradients: int) -> Tuple[List[RoundingStatistics], List[float]]:
        """Wait for the kernels launched so far, and copy the first rows and places to the host."""
        # An unwritten row is that of an empty array, an unwritten place 0.
        table = self._launcher.fetch(self._memory, self._before_rows + rows * self._row.itemsize)
        largest = table[: 4 * gradients].view(np.float32).tolist()
        if not rows:
            return [], largest
        records = table[self._before_rows :].view(self._row)
        magnitudes = np.stack([records["largest"], np.negative(records["negated_smallest"])]).view(np.float32)
        sums = [records[name] for name in ("count", "sum", "sum_of_squares")]
        columns = [*sums, *magnitudes, records["zeros"], records["nonfinite"]]
        statistics = [ArrayStatistics(*row) for row in zip(*(column.tolist() for column in columns))]
        results = zip(statistics, records["underflowed"].tolist(), records["overflowed"].tolist())
        return [RoundingStatistics(*row) for row in results], largest
