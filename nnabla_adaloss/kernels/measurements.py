# SPDX-License-Identifier: Apache-2.0
"""Work whose results are not needed before the end of a backward pass, and one wait for all of them."""

from __future__ import annotations

import math
from typing import List, NamedTuple, Optional, Protocol, Sequence, Tuple

import nnabla as nn

from ..core.statistics import ArrayStatistics
from .cuda import CudaKernels
from .device_table import DeviceTable
from .interface import GradientsInPlace, GradientToUnscale, Kernels

# Places of a table's largest magnitudes: that of all watched arrays, in the first table, then the gradients.
_WATCHED, _FIRST_GRADIENT = 0, 1


class Measured(NamedTuple):
    """The results of one pass.

    Attributes:
        statistics: one entry per measured array, in the order of the tickets.
        largest: the largest magnitude of each unscaled gradient, in the order of the gradients; infinity
            where it, or what it was added to, holds an infinity or NaN.
        watched_finite: whether the arrays that were watched are finite; None: none was.
    """

    statistics: List[ArrayStatistics]
    largest: List[float]
    watched_finite: Optional[bool] = None


class Measurements(Protocol):
    """Takes work during a pass and hands all results out at its end."""

    def measure(self, arrays: Sequence[nn.NdArray]) -> List[int]:
        """Start taking the statistics of arrays as they are now; return the tickets of the results."""

    def watch(self, arrays: Sequence[nn.NdArray]) -> None:
        """Start looking whether arrays are finite: once a pass."""

    def unscale(self, gradients: Sequence[GradientToUnscale]) -> None:
        """Start unscaling gradients into their masters."""

    def unscale_in_place(self, gradients: GradientsInPlace) -> None:
        """Start unscaling gradients where they are."""

    def fetch(self) -> Measured:
        """Wait for everything that was started, return it and forget it."""


class HostMeasurements:
    """Measurements by kernels that return when they are done."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._statistics: List[ArrayStatistics] = []
        self._largest: List[float] = []
        self._watched_finite: Optional[bool] = None

    def measure(self, arrays: Sequence[nn.NdArray]) -> List[int]:
        first = len(self._statistics)
        self._statistics += self._kernels.statistics_all(arrays)
        return list(range(first, len(self._statistics)))

    def watch(self, arrays: Sequence[nn.NdArray]) -> None:
        self._watched_finite = self._kernels.all_finite(arrays)

    def unscale(self, gradients: Sequence[GradientToUnscale]) -> None:
        self._largest += self._kernels.unscale_add_all(gradients)

    def unscale_in_place(self, gradients: GradientsInPlace) -> None:
        self._largest += self._kernels.unscale_in_place(gradients)

    def fetch(self) -> Measured:
        measured = Measured(self._statistics, self._largest, self._watched_finite)
        self._statistics, self._largest, self._watched_finite = [], [], None
        return measured


class DeviceMeasurements:
    """Measurements on a GPU: kernels write into a table in device memory, which is copied once per pass.

    A table is for `rows` measured arrays and as many unscaled gradients; when there are more, one more is
    made.
    """

    def __init__(self, kernels: CudaKernels, rows: int) -> None:
        self._kernels = kernels
        self._rows = rows
        self._tables = [self._new_table()]
        self._used = 0
        self._unscaled = 0
        self._watched: Optional[int] = None

    def measure(self, arrays: Sequence[nn.NdArray]) -> List[int]:
        first, waiting = self._used, list(arrays)
        while waiting:
            table, row = self._place(self._used)
            some, waiting = waiting[: self._rows - row], waiting[self._rows - row :]
            self._kernels.launch_statistics(some, table, row)
            self._used += len(some)
        return list(range(first, self._used))

    def watch(self, arrays: Sequence[nn.NdArray]) -> None:
        self._watched = len(arrays)
        self._kernels.launch_largest(arrays, self._tables[0])

    def unscale(self, gradients: Sequence[GradientToUnscale]) -> None:
        waiting = list(gradients)
        while waiting:
            table, first = self._place(self._unscaled)
            some, waiting = waiting[: self._rows - first], waiting[self._rows - first :]
            self._kernels.launch_unscale_add(some, table, _FIRST_GRADIENT + first)
            self._unscaled += len(some)

    def unscale_in_place(self, gradients: GradientsInPlace) -> None:
        start, end = 0, len(gradients.arrays)
        while start < end:
            table, first = self._place(self._unscaled)
            part = slice(start, min(end, start + self._rows - first))
            self._kernels.launch_unscale_in_place(gradients, table, part, _FIRST_GRADIENT + first)
            self._unscaled += part.stop - start
            start = part.stop

    def fetch(self) -> Measured:
        statistics: List[ArrayStatistics] = []
        largest: List[float] = []
        used, unscaled, watched = self._used, self._unscaled, self._watched
        self._used = self._unscaled = 0
        self._watched = None
        watched_finite = None if watched is None else True
        for table in self._tables:
            rows, gradients = min(used, self._rows), min(unscaled, self._rows)
            if rows or gradients or watched:
                contents = table.fetch(rows, _FIRST_GRADIENT + gradients)
                table.clear()
                statistics.extend(row.statistics for row in contents.rows)
                largest.extend(contents.largest[_FIRST_GRADIENT:])
                if watched:
                    watched_finite = math.isfinite(contents.largest[_WATCHED])
            used, unscaled, watched = used - rows, unscaled - gradients, 0
        return Measured(statistics, largest, watched_finite)

    def _new_table(self) -> DeviceTable:
        return self._kernels.table(self._rows, gradients=_FIRST_GRADIENT + self._rows)

    def _place(self, index: int) -> Tuple[DeviceTable, int]:
        """The table and the place in it for the measurement of this number."""
        table, place = divmod(index, self._rows)
        if table == len(self._tables):
            self._tables.append(self._new_table())
        return self._tables[table], place


def measurements_by(kernels: Kernels, rows: int) -> Measurements:
    """The measurements that suit `kernels`; `rows` is how many arrays one pass measures."""
    if isinstance(kernels, CudaKernels):
        return DeviceMeasurements(kernels, rows)
    return HostMeasurements(kernels)
