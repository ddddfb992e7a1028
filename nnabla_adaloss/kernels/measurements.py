# SPDX-License-Identifier: Apache-2.0
"""Measurements of a backward pass whose results are fetched together at its end."""

from __future__ import annotations

import math
from typing import List, NamedTuple, Optional, Union, cast

import nnabla as nn
import numpy as np

from ..core.statistics import ArrayStatistics
from ..host_context import host_view
from .arrays import Arrays, is_readable
from .cpu import CpuKernels
from .cuda import CudaKernels
from .device_tasks import DeviceTasks
from .interface import Kernels, UnscalingList

# Places of largest magnitudes in a table: of all watched arrays, and of the loss; then those of gradients.
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

    def measure(self, arrays: Arrays) -> List[int]:
        """Start computing the statistics of the arrays' present contents; return tickets of the results."""
        statistics = self._results.statistics
        statistics += self._kernels.statistics_all(arrays)
        return list(range(len(statistics) - len(arrays), len(statistics)))

    def watch(self, arrays: Arrays, loss: Optional[nn.NdArray] = None) -> None:
        """Start checking that arrays are finite, and the loss; call once per pass."""
        finite = not arrays or math.isfinite(self._kernels.largest(arrays))
        loss_amax = 0.0 if loss is None else float(np.abs(host_view(loss)).max(initial=0.0))
        self._results = Results(*self._results[:2], finite, loss_amax)

    def unscale(self, gradients: UnscalingList) -> None:
        """Start unscaling gradients."""
        # Gradients in place become float32, exactly, even if nnabla has stored float16; checking would take a
        # sixth of the time of many small gradients.
        self._results.largest.extend(self._kernels.unscale_list(gradients))

    def fetch(self) -> Results:
        """Wait for all started measurements, return their results and reset."""
        results, self._results = self._results, Results([], [])
        return results


class DeviceMeasurements:
    """Measurements on a GPU: kernels write to a table of `rows` results, which is copied once per pass."""

    def __init__(self, kernels: CudaKernels, rows: int) -> None:
        self._kernels = kernels
        self._results = Results([], [])  # of this pass, from tables that were too small for it
        self._make_table(rows)
        self._used = self._unscaled = 0
        self._watched = False
        self._watching: Optional[DeviceTasks] = None  # of the last `watch`, for the next one

    def measure(self, arrays: Arrays) -> List[int]:
        self._make_room(self._used + len(arrays))
        self._kernels.launch_statistics(arrays, self._table, self._used)
        self._used += len(arrays)
        end = len(self._results.statistics) + self._used
        return list(range(end - len(arrays), end))

    def watch(self, arrays: Arrays, loss: Optional[nn.NdArray] = None) -> None:
        losses = [] if loss is None or not is_readable(loss) else [loss]
        places = [_WATCHED] * len(arrays) + [_LOSS] * len(losses)
        self._watched = bool(places)
        watched = [*arrays, *losses]
        self._watching = self._kernels.launch_largest(watched, self._table, places, self._watching)

    def unscale(self, gradients: UnscalingList) -> None:
        count = len(gradients.sources)
        self._make_room(self._unscaled + count)
        self._kernels.launch_unscale_list(gradients, self._table, _FIRST_GRADIENT + self._unscaled)
        self._unscaled += count

    def fetch(self) -> Results:
        (statistics, largest, finite, loss_amax), self._results = self._results, Results([], [])
        used, unscaled, watched = self._used, self._unscaled, self._watched
        self._used = self._unscaled = 0
        self._watched = False
        if used or unscaled or watched:
            rows, magnitudes = self._table.fetch(used, _FIRST_GRADIENT + unscaled)
            self._table.clear()
            statistics += [row.statistics for row in rows]
            largest += magnitudes[_FIRST_GRADIENT:]
            if watched:
                finite, loss_amax = math.isfinite(magnitudes[_WATCHED]), magnitudes[_LOSS]
        return Results(statistics, largest, finite, loss_amax)

    def _make_table(self, rows: int) -> None:
        self._rows, self._table = rows, self._kernels.table(rows, gradients=_FIRST_GRADIENT + rows)

    def _make_room(self, rows: int) -> None:
        """Make a larger table, if this one has fewer rows; that is rare, and waits for the results so far."""
        if rows > self._rows:
            self._results = self.fetch()
            self._make_table(2 * rows)


Measurements = Union[HostMeasurements, DeviceMeasurements]


def measurements_by(kernels: Kernels, rows: int) -> Measurements:
    """Choose the measurements for `kernels`; `rows` is the number of arrays measured in a pass."""
    if isinstance(kernels, CudaKernels):
        return DeviceMeasurements(kernels, rows)
    return HostMeasurements(cast(CpuKernels, kernels))
