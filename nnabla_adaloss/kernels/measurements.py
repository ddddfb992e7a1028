# SPDX-License-Identifier: Apache-2.0
"""Work whose results are not needed before the end of a backward pass, and one wait for all of them."""

from __future__ import annotations

import math
from typing import List, Optional, Sequence, Tuple, Union, cast

import nnabla as nn

from ..core.statistics import ArrayStatistics
from .cpu import CpuKernels
from .cuda import CudaKernels
from .device_tasks import DeviceTable
from .interface import Kernels, Unscaling, UnscalingList

# Places of a table's largest magnitudes: that of all watched arrays, in the first table, then the gradients.
_WATCHED, _FIRST_GRADIENT = 0, 1


Results = Tuple[List[ArrayStatistics], List[float], Optional[bool]]
"""Statistics of the measured arrays, in the order of the tickets; the magnitudes that `Kernels.unscale_add`
returns, in the order of the gradients; and whether the watched arrays are finite, None without any.
"""


class HostMeasurements:
    """Work of a pass, whose results are fetched together at its end; kernels of the CPU do it at once."""

    def __init__(self, kernels: CpuKernels) -> None:
        self._kernels = kernels
        self._results: Results = [], [], None

    def measure(self, arrays: Sequence[nn.NdArray]) -> List[int]:
        """Start taking the statistics of arrays as they are now; return the tickets of the results."""
        statistics = self._results[0]
        statistics += self._kernels.statistics_all(arrays)
        return list(range(len(statistics) - len(arrays), len(statistics)))

    def watch(self, arrays: Sequence[nn.NdArray]) -> None:
        """Start looking whether arrays are finite: once a pass."""
        self._results = (*self._results[:2], self._kernels.all_finite(arrays))

    def unscale(self, gradients: Sequence[Unscaling]) -> None:
        """Start unscaling gradients into their masters."""
        self._results[1].extend(self._kernels.unscale_add_all(gradients))

    def unscale_list(self, gradients: UnscalingList) -> None:
        """Start unscaling a list of gradients."""
        # In place, nnabla makes those float32 that it turned into float16, exactly; to look for them would
        # take a sixth of the time that many small gradients take.
        self._results[1].extend(self._kernels.unscale_list(gradients))

    def fetch(self) -> Results:
        """Wait for everything that was started, return it and forget it."""
        results, self._results = self._results, ([], [], None)
        return results


class DeviceMeasurements:
    """The same on a GPU: kernels write into tables of `rows` results, which are copied once per pass."""

    def __init__(self, kernels: CudaKernels, rows: int) -> None:
        self._kernels = kernels
        self._rows = rows
        self._tables = [self._new_table()]
        self._used = 0
        self._unscaled = 0
        self._watched: Optional[int] = None

    def measure(self, arrays: Sequence[nn.NdArray]) -> List[int]:
        first, self._used = self._used, self._used + len(arrays)
        for table, row, part in self._places(first, self._used):
            self._kernels.launch_statistics(arrays[part], table, row)
        return list(range(first, self._used))

    def watch(self, arrays: Sequence[nn.NdArray]) -> None:
        self._watched = len(arrays)
        self._kernels.launch_largest(arrays, self._tables[0])

    def unscale(self, gradients: Sequence[Unscaling]) -> None:
        first, self._unscaled = self._unscaled, self._unscaled + len(gradients)
        for table, place, part in self._places(first, self._unscaled):
            self._kernels.launch_unscale_add(gradients[part], table, _FIRST_GRADIENT + place)

    def unscale_list(self, gradients: UnscalingList) -> None:
        first, self._unscaled = self._unscaled, self._unscaled + len(gradients.sources)
        for table, place, part in self._places(first, self._unscaled):
            self._kernels.launch_unscale_list(gradients, table, part, _FIRST_GRADIENT + place)

    def fetch(self) -> Results:
        statistics: List[ArrayStatistics] = []
        largest: List[float] = []
        used, unscaled, watched = self._used, self._unscaled, self._watched
        self._used = self._unscaled = 0
        self._watched = None
        watched_finite = None if watched is None else True
        for table in self._tables:
            rows, gradients = min(used, self._rows), min(unscaled, self._rows)
            if rows or gradients or watched:
                found, magnitudes = table.fetch(rows, _FIRST_GRADIENT + gradients)
                table.clear()
                statistics.extend(row.statistics for row in found)
                largest.extend(magnitudes[_FIRST_GRADIENT:])
                if watched:
                    watched_finite = math.isfinite(magnitudes[_WATCHED])
            used, unscaled, watched = used - rows, unscaled - gradients, 0
        return statistics, largest, watched_finite

    def _new_table(self) -> DeviceTable:
        return self._kernels.table(self._rows, gradients=_FIRST_GRADIENT + self._rows)

    def _places(self, first: int, end: int) -> List[Tuple[DeviceTable, int, slice]]:
        """The tables for results number `first` up to `end`, the first place in each, and which they are."""
        places, number = [], first
        while number < end:
            table, place = divmod(number, self._rows)
            if table == len(self._tables):
                self._tables.append(self._new_table())
            after = min(end, number + self._rows - place)
            places.append((self._tables[table], place, slice(number - first, after - first)))
            number = after
        return places


Measurements = Union[HostMeasurements, DeviceMeasurements]


def measurements_by(kernels: Kernels, rows: int) -> Measurements:
    """The measurements that suit `kernels`; `rows` is how many arrays one pass measures."""
    if isinstance(kernels, CudaKernels):
        return DeviceMeasurements(kernels, rows)
    return HostMeasurements(cast(CpuKernels, kernels))
