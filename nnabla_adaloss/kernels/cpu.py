# SPDX-License-Identifier: Apache-2.0
"""Kernels for the arrays of nnabla's CPU contexts, compiled from C."""

from __future__ import annotations

import ctypes
import math
from struct import Struct
from typing import List, Optional, Tuple

import numpy as np
from nnabla import NdArray
from numpy.typing import ArrayLike, NDArray

from ..core.formats import Format
from ..core.statistics import ArrayStatistics
from ..host_context import HOST, array_type, host_view
from .addresses import addresses_of
from .arrays import FLOAT16, FLOAT32, Arrays, is_half, require_same_size, which_are_half
from .cpu_library import allowed_threads, levels, library
from .interface import EXPONENT_BINS, Kernels, RoundingStatistics, ScaledCopies, UnscalingList

# Structs of native/adaloss.h. All fields have eight bytes, so there is no padding.
_STATISTICS_TASK = Struct("=QqqQ")  # address, size, half, address of counts
_SCALE_TASK = Struct("=QQqqqqd")  # source, target, size, source is half, target is half, accumulate, factor
_ROUNDING_TASK = Struct("=QQqqdddqqQ")  # source, target, size, mantissa bits, 3 limits, fitted, random, key
_STATISTICS = Struct("=ddddqqqq")  # sum, squares, abs max, abs min, zeros, nonfinite, underflowed, overflowed
_ROW = ctypes.c_char * _STATISTICS.size


class CpuKernels(Kernels):
    """`Kernels` on the host: `level` of `levels()` (None: the fastest), and `threads` per large array."""

    # Arrays may be of any context: nnabla copies those on a device to the host and back.

    asynchronous = False
    context = HOST

    def __init__(self, level: Optional[str] = None, threads: Optional[int] = None) -> None:
        self._library = library()
        self._level = self._library.adaloss_level(0 if level is None else levels().index(level))
        self._threads = allowed_threads() if threads is None else threads

    def statistics(self, x: NdArray) -> ArrayStatistics:
        return self.statistics_all([x])[0]

    def statistics_all(self, arrays: Arrays, counts: int = 0) -> List[ArrayStatistics]:
        """`statistics` of many arrays; `counts` is the address of their exponent histogram, 0 for none."""
        count = len(arrays)
        if not count:
            return []
        halves = which_are_half(arrays)
        tasks = np.zeros((count, _STATISTICS_TASK.size // 8), np.int64)
        tasks[:, 0] = addresses_of(arrays, halves, HOST)
        sizes = tasks[:, 1] = [x.size for x in arrays]
        if halves is not None:
            tasks[:, 2] = halves
        tasks[:, 3] = counts
        rows = array_type(_ROW, count)()
        self._library.adaloss_statistics(self._level, self._threads, tasks.tobytes(), count, rows)
        return [ArrayStatistics(size, *row[:6]) for size, row in zip(sizes, _STATISTICS.iter_unpack(rows))]

    def exponent_histogram(self, x: NdArray) -> Tuple[ArrayStatistics, NDArray[np.int64]]:
        counts = np.zeros(EXPONENT_BINS, np.int64)
        return self.statistics_all([x], counts.ctypes.data)[0], counts

    def largest(self, arrays: Arrays) -> float:
        magnitudes = (math.inf if x.nonfinite else x.abs_max for x in self.statistics_all(arrays))
        return max(magnitudes, default=0.0)

    def mark_nonfinite(self, arrays: Arrays, mark: NdArray) -> None:
        if not math.isfinite(self.largest(arrays)):
            host_view(mark)[-1] = math.inf

    def scaled_copy_all(self, copies: ScaledCopies) -> None:
        # One call into the library for all: a call costs as much as a small array.
        sources, targets, to_half = copies.sources, copies.targets, copies.half
        from_half = which_are_half(sources)
        sizes = require_same_size(sources, targets)
        if from_half is not None:
            to_half = from_half if to_half is None else from_half | to_half
        if copies.tasks_on_host is None or copies.sizes != sizes:
            copies.sizes, copies.tasks_on_host = sizes, _scale_tasks(sizes, copies.alphas)
        tasks = copies.tasks_on_host
        tasks[:, 0] = addresses_of(sources, from_half, HOST)
        tasks[:, 1] = addresses_of(targets, to_half, HOST, write_only=True)
        tasks[:, 3] = 0 if from_half is None else from_half
        tasks[:, 4] = 0 if to_half is None else to_half
        self._scale(tasks.tobytes())

    def scale_(self, x: NdArray, alpha: float) -> None:
        half = is_half(x)
        address = x.data_ptr(FLOAT16 if half else FLOAT32, HOST)
        self._scale(_SCALE_TASK.pack(address, address, x.size, half, half, False, alpha))

    def unscale_add(self, source: NdArray, master: NdArray, scale: float, *, accumulate: bool) -> float:
        return self.unscale_list(UnscalingList([source], [scale], [master], [accumulate]))[0]

    def unscale_list(self, gradients: UnscalingList) -> List[float]:
        """Apply `unscale_add` to many gradients; return each result."""
        sources, masters, tasks = gradients.sources, gradients.masters, gradients.tasks
        halves = None if masters is None else which_are_half(sources)
        where = to = addresses_of(sources, halves, HOST)
        if masters is not None:
            to = addresses_of(masters, None, HOST, write_only=gradients.accumulate is None)
        if tasks is None:
            tasks = gradients.tasks = _scale_tasks(gradients.sizes, gradients.factors)
            if gradients.accumulate is not None:
                tasks[:, 5] = gradients.accumulate
        tasks[:, 0], tasks[:, 1] = where, to
        if masters is not None:
            tasks[:, 3] = 0 if halves is None else halves
        return self._scale(tasks.tobytes())

    def _round(
        self, source: NdArray, target: NdArray, storage: Format, fitted: bool, random_key: Optional[int]
    ) -> RoundingStatistics:
        from_address = source.data_ptr(FLOAT32, HOST)
        to_address = from_address if target is source else target.data_ptr(FLOAT32, HOST, True)
        limits = storage.mantissa_bits, storage.smallest_normal, storage.max, storage.beyond_max
        how, size = (fitted, random_key is not None, random_key or 0), source.size
        task, row = _ROUNDING_TASK.pack(from_address, to_address, size, *limits, *how), _ROW()
        self._library.adaloss_round(self._level, self._threads, task, row)
        numbers = _STATISTICS.unpack(row)
        return RoundingStatistics(ArrayStatistics(size, *numbers[:6]), *numbers[6:])

    def _scale(self, tasks: bytes) -> List[float]:
        """Run scaling tasks; return the largest magnitude of each product, infinity if one is not finite."""
        count = len(tasks) // _SCALE_TASK.size
        largest = array_type(ctypes.c_double, count)()
        self._library.adaloss_scale(self._level, self._threads, tasks, count, largest)
        amaxes: List[float] = largest[:]
        return amaxes


def _scale_tasks(sizes: ArrayLike, factors: ArrayLike) -> NDArray[np.int64]:
    """Scaling tasks of float32 arrays, one per row, without their addresses and without accumulation."""
    table = np.zeros((np.size(sizes), _SCALE_TASK.size // 8), np.int64)
    table[:, 2], table[:, -1] = sizes, np.asarray(factors, np.float64).view(np.int64)
    return table
