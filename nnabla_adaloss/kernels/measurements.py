# SPDX-License-Identifier: Apache-2.0
"""Work whose results are not needed before the end of a backward pass, and one wait for all of them."""

from __future__ import annotations

from typing import List, NamedTuple, Protocol, Sequence

import nnabla as nn

from ..core.statistics import ArrayStatistics
from .cuda import CudaKernels
from .interface import GradientToUnscale, Kernels


class Measured(NamedTuple):
    """The results of one pass.

    Attributes:
        statistics: one entry per measured array, in the order of the tickets.
        found_inf: whether an unscaled gradient holds an infinity or NaN.
    """

    statistics: List[ArrayStatistics]
    found_inf: bool


class Measurements(Protocol):
    """Takes work during a pass and hands all results out at its end."""

    def measure(self, array: nn.NdArray) -> int:
        """Start taking the statistics of `array` as it is now; return the ticket of the result."""

    def unscale(self, gradients: Sequence[GradientToUnscale]) -> None:
        """Start unscaling gradients into their masters."""

    def fetch(self) -> Measured:
        """Wait for everything that was started, return it and forget it."""


class HostMeasurements:
    """Measurements by kernels that return when they are done.

    Args:
        kernels: kernels of the CPU, or of any backend whose results may be waited for one by one.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._statistics: List[ArrayStatistics] = []
        self._found_inf = False

    def measure(self, array: nn.NdArray) -> int:
        """Take the statistics of `array`; return the ticket of the result."""
        self._statistics.append(self._kernels.statistics(array))
        return len(self._statistics) - 1

    def unscale(self, gradients: Sequence[GradientToUnscale]) -> None:
        """Unscale gradients into their masters."""
        self._found_inf |= self._kernels.unscale_add_all(gradients)

    def fetch(self) -> Measured:
        """Hand out everything, and forget it."""
        measured = Measured(self._statistics, self._found_inf)
        self._statistics, self._found_inf = [], False
        return measured


class DeviceMeasurements:
    """Measurements on a GPU: kernels write into a table in device memory, which is copied once per pass.

    Args:
        kernels: the GPU's kernels.
        rows: how many arrays one pass measures ordinarily; a table more is made when there are more.
    """

    def __init__(self, kernels: CudaKernels, rows: int) -> None:
        self._kernels = kernels
        self._rows = rows
        self._tables = [kernels.table(rows)]
        self._used = 0

    def measure(self, array: nn.NdArray) -> int:
        """Launch the statistics of `array`; return the ticket of the result."""
        table, row = divmod(self._used, self._rows)
        if table == len(self._tables):
            self._tables.append(self._kernels.table(self._rows))
        self._kernels.launch_statistics([array], self._tables[table], row)
        self._used += 1
        return self._used - 1

    def unscale(self, gradients: Sequence[GradientToUnscale]) -> None:
        """Launch the unscaling of gradients into their masters: one launch for up to 96 of them."""
        self._kernels.launch_unscale_add(gradients, self._tables[0])

    def fetch(self) -> Measured:
        """Wait for the device once, return everything and forget it."""
        statistics: List[ArrayStatistics] = []
        found_inf = False
        for table in self._tables:
            contents = table.fetch()
            table.clear()
            statistics += [row.statistics for row in contents.rows]
            found_inf |= contents.found_inf
        used, self._used = self._used, 0
        return Measured(statistics[:used], found_inf)


def measurements_by(kernels: Kernels, rows: int) -> Measurements:
    """The measurements that suit `kernels`; `rows` is how many arrays one pass measures."""
    if isinstance(kernels, CudaKernels):
        return DeviceMeasurements(kernels, rows)
    return HostMeasurements(kernels)
