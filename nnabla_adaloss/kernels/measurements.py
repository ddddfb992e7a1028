# SPDX-License-Identifier: Apache-2.0
"""Measurements of a backward pass whose results are fetched together at its end."""

from __future__ import annotations

import math
from typing import List, NamedTuple, Optional, Sequence, Tuple, Union, cast

import nnabla as nn
import numpy as np

from ..core.statistics import ArrayStatistics
from ..host_context import host_view
from .arrays import is_readable
from .cpu import CpuKernels
from .cuda import CudaKernels
from .device_tasks import DeviceTable, DeviceTasks
from .interface import Kernels, UnscalingList

# Places of largest magnitudes in a table; the first table has those of all watched arrays and of the loss,
# then gradients.
_WATCHED, _LOSS, _FIRST_GRADIENT = 0, 1, 2


class Results(NamedTuple):
    """Results of all measurements of a pass."""

    statistics: List[ArrayStatistics]  # of the measured arrays, in the order of the tickets
    largest: List[float]  # results of `Kernels.unscale_add`, in the order of the gradients
    watched_finite: bool = True  # True if the watched arrays are finite
    loss_amax: float = 0.0  # largest magnitude of the watched loss, infinity and NaN included


class HostMeasurements:
    """Measurements of a pass, whose results are fetched together at its end; run at once by CPU kernels."""

    def __init__(self, kernels: CpuKernels) -> None:
        self._kernels = kernels
        self._results = Results([], [])

    def measure(self, arrays: Sequence[nn.NdArray]) -> List[int]:
        """Start computing the statistics of the arrays' present contents; return tickets of the results."""
        statistics = self._results.statistics
        statistics += self._kernels.statistics_all(arrays)
        return list(range(len(statistics) - len(arrays), len(statistics)))

    def watch(self, arrays: Sequence[nn.NdArray], loss: Optional[nn.NdArray] = None) -> None:
        """Start checking that arrays are finite, and the loss; call once per pass."""
        finite = not arrays or math.isfinite(self._kernels.largest(arrays))
        loss_amax = 0.0 if loss is None else float(np.abs(host_view(loss)).max(initial=0.0))
        self._results = Results(*self._results[:2], finite, loss_amax)

    def unscale(self, gradients: UnscalingList) -> None:
        """Start unscaling gradients."""
        # Gradients in place become float32, exactly, even if nnabla has stored float16; checking would take a
        # sixth of the time of many small gradients.
        self._results[1].extend(self._kernels.unscale_list(gradients))

    def fetch(self) -> Results:
        """Wait for all started measurements, return their results and reset."""
        results, self._results = self._results, Results([], [])
        return results


class DeviceMeasurements:
    """Measurements on a GPU: kernels write to tables of `rows` results, which are copied once per pass."""

    def __init__(self, kernels: CudaKernels, rows: int) -> None:
        self._kernels = kernels
        self._rows = rows
        self._tables = [self._new_table()]
        self._used = 0
        self._unscaled = 0
        self._watched = False
        self._watching: Optional[DeviceTasks] = None

    def measure(self, arrays: Sequence[nn.NdArray]) -> List[int]:
        first, self._used = self._used, self._used + len(arrays)
        for table, row, part in self._places(first, self._used):
            self._kernels.launch_statistics(arrays[part], table, row)
        return list(range(first, self._used))

    def watch(self, arrays: Sequence[nn.NdArray], loss: Optional[nn.NdArray] = None) -> None:
        losses = [] if loss is None or not is_readable(loss) else [loss]
        places = [_WATCHED] * len(arrays) + [_LOSS] * len(losses)
        self._watched = bool(places)
        watched = [*arrays, *losses]
        self._watching = self._kernels.launch_largest(watched, self._tables[0], places, self._watching)

    def unscale(self, gradients: UnscalingList) -> None:
        first, self._unscaled = self._unscaled, self._unscaled + len(gradients.sources)
        for table, place, part in self._places(first, self._unscaled):
            self._kernels.launch_unscale_list(gradients, table, part, _FIRST_GRADIENT + place)

    def fetch(self) -> Results:
        results = Results([], [])
        # Results that the remaining tables hold.
        rows_left, gradients_left, watched = self._used, self._unscaled, self._watched
        self._used = self._unscaled = 0
        self._watched = False
        for table in self._tables:
            rows, gradients = min(rows_left, self._rows), min(gradients_left, self._rows)
            if rows or gradients or watched:
                fetched, magnitudes = table.fetch(rows, _FIRST_GRADIENT + gradients)
                table.clear()
                results.statistics.extend(row.statistics for row in fetched)
                results.largest.extend(magnitudes[_FIRST_GRADIENT:])
                if watched:
                    finite = math.isfinite(magnitudes[_WATCHED])
                    results = results._replace(watched_finite=finite, loss_amax=magnitudes[_LOSS])
            # Watched arrays have their places in the first table.
            rows_left, gradients_left, watched = rows_left - rows, gradients_left - gradients, False
        return results

    def _new_table(self) -> DeviceTable:
        return self._kernels.table(self._rows, gradients=_FIRST_GRADIENT + self._rows)

    def _places(self, first: int, end: int) -> List[Tuple[DeviceTable, int, slice]]:
        """Tables for results `first` up to `end`, the first place in each, and the range of results."""
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
    """Choose the measurements for `kernels`; `rows` is the number of arrays measured in a pass."""
    if isinstance(kernels, CudaKernels):
        return DeviceMeasurements(kernels, rows)
    return HostMeasurements(cast(CpuKernels, kernels))
