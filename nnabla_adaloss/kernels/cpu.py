# SPDX-License-Identifier: Apache-2.0
"""Kernels for the arrays of nnabla's CPU contexts, compiled by numba."""

from __future__ import annotations

from operator import attrgetter
from typing import Iterable, List, Optional, Sequence, Tuple

import numpy as np
from nnabla import Context, NdArray

from ..core.formats import Format
from ..core.statistics import ArrayStatistics
from ..host_context import HOST
from . import cpu_loops
from .array_checks import (
    is_half,
    require_float32,
    require_same_size,
    unscaling_factor,
)
from .arrays import FLOAT16, FLOAT32
from .interface import (
    EXPONENT_BINS,
    ExponentHistogram,
    GradientsInPlace,
    GradientToUnscale,
    RoundingStatistics,
    ScaledCopy,
)

_dtype = attrgetter("dtype")


class CpuKernels:
    """`Kernels` in one pass over memory each, at or near its bandwidth; about 5 µs per call besides.

    numba compiles a kernel when it is first called, in one to three seconds, and keeps it on disk: beside
    this file, or in the user's cache directory if that cannot be written (see numba's NUMBA_CACHE_DIR).

    Example:
        >>> import numpy as np, nnabla as nn
        >>> x = nn.NdArray.from_numpy_array(np.array([3.0, -0.5, 0.0], np.float32))
        >>> CpuKernels().statistics(x).abs_max
        3.0
    """

    @property
    def asynchronous(self) -> bool:
        return False

    @property
    def context(self) -> Context:
        return HOST

    def statistics(self, x: NdArray) -> ArrayStatistics:
        half = is_half(x)
        size = x.size
        address = x.data_ptr(FLOAT16 if half else FLOAT32, HOST)
        return ArrayStatistics(size, *cpu_loops.statistics(address, size, half, 0))

    def exponent_histogram(self, x: NdArray) -> Tuple[ArrayStatistics, ExponentHistogram]:
        half = is_half(x)
        size = x.size
        address = x.data_ptr(FLOAT16 if half else FLOAT32, HOST)
        counts = np.zeros(EXPONENT_BINS, np.int64)
        statistics = ArrayStatistics(size, *cpu_loops.statistics(address, size, half, counts.ctypes.data))
        return statistics, counts

    def all_finite(self, arrays: Sequence[NdArray]) -> bool:
        return not any(self.statistics(x).nonfinite for x in arrays)

    def scaled_copy(self, source: NdArray, target: NdArray, alpha: float, *, half: bool = False) -> None:
        from_half = is_half(source)
        to_half = half or from_half
        size = require_same_size(source, target)
        from_address = source.data_ptr(FLOAT16 if from_half else FLOAT32, HOST)
        to_address = target.data_ptr(FLOAT16 if to_half else FLOAT32, HOST, True)
        cpu_loops.scaled_copy(from_address, to_address, size, from_half, to_half, float(alpha))

    def scaled_copy_all(self, copies: Iterable[ScaledCopy]) -> None:
        table, factors = [], []
        for source, target, alpha, half in copies:
            from_half = is_half(source)
            to_half = half or from_half
            size = require_same_size(source, target)
            from_address = source.data_ptr(FLOAT16 if from_half else FLOAT32, HOST)
            to_address = target.data_ptr(FLOAT16 if to_half else FLOAT32, HOST, True)
            table.append((from_address, to_address, size, from_half, to_half))
            factors.append(alpha)
        if table:
            cpu_loops.scaled_copies(np.array(table, np.int64), np.array(factors, np.float64))

    def scale_(self, x: NdArray, alpha: float) -> None:
        half = is_half(x)
        address = x.data_ptr(FLOAT16 if half else FLOAT32, HOST)
        cpu_loops.scaled_copy(address, address, x.size, half, half, float(alpha))

    def unscale_add(self, source: NdArray, master: NdArray, scale: float, *, accumulate: bool) -> float:
        factor = unscaling_factor(scale)
        half = is_half(source)
        size = require_same_size(source, master)
        from_address = source.data_ptr(FLOAT16 if half else FLOAT32, HOST)
        if accumulate or source is master:
            require_float32(master, "master")
        to_address = from_address if source is master else master.data_ptr(FLOAT32, HOST, not accumulate)
        return float(cpu_loops.unscale_add(from_address, to_address, size, half, factor, accumulate))

    def unscale_add_all(self, gradients: Iterable[GradientToUnscale]) -> List[float]:
        # One call into compiled code for all: a call costs as much as a small array does.
        table, factors = [], []
        for source, master, scale, accumulate in gradients:
            half = is_half(source)
            size = require_same_size(source, master)
            from_address = to_address = source.data_ptr(FLOAT16 if half else FLOAT32, HOST)
            if accumulate or source is master:
                require_float32(master, "master")
            if source is not master:
                to_address = master.data_ptr(FLOAT32, HOST, not accumulate)
            table.append((from_address, to_address, size, half, accumulate))
            factors.append(unscaling_factor(scale))
        if not table:
            return []
        found: List[float] = cpu_loops.unscale_adds(
            np.array(table, np.int64), np.array(factors, np.float64)
        ).tolist()
        return found

    def unscale_in_place(self, gradients: GradientsInPlace) -> List[float]:
        arrays = gradients.arrays
        if set(map(_dtype, arrays)) != {FLOAT32}:
            return self.unscale_add_all(gradients.tasks)
        table = np.zeros((len(arrays), 5), np.int64)
        table[:, 0] = table[:, 1] = [x.data_ptr(FLOAT32, HOST) for x in arrays]
        table[:, 2] = gradients.sizes
        found: List[float] = cpu_loops.unscale_adds(table, gradients.factors).tolist()
        return found

    def round_to_format(
        self,
        source: NdArray,
        target: NdArray,
        storage: Format,
        *,
        fitted: bool = False,
        random_key: Optional[int] = None,
    ) -> RoundingStatistics:
        require_float32(source, "source")
        if storage.mantissa_bits >= 23:
            if target is not source:
                self.scaled_copy(source, target, 1.0)
            return RoundingStatistics(self.statistics(source), 0, 0)
        size = require_same_size(source, target)
        from_address = source.data_ptr(FLOAT32, HOST)
        to_address = from_address if target is source else target.data_ptr(FLOAT32, HOST, True)
        *statistics, underflowed, overflowed = cpu_loops.round_to_format(
            from_address,
            to_address,
            size,
            storage.mantissa_bits,
            storage.smallest_normal,
            storage.max,
            storage.beyond_max,
            fitted,
            random_key is not None,
            (random_key or 0) & 0xFFFFFFFF,
            (random_key or 0) >> 32,
        )
        return RoundingStatistics(ArrayStatistics(size, *statistics), underflowed, overflowed)
