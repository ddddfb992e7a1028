# SPDX-License-Identifier: Apache-2.0
"""Kernels written with nnabla's own functions: any context, nothing compiled, slow."""

from __future__ import annotations

import math
from typing import Any, Iterable, List, Optional, Sequence, Tuple

import nnabla as nn
import nnabla.functions as F
import numpy as np
from nnabla import NdArray

from ..core.formats import FLOAT16, Format
from ..core.statistics import ArrayStatistics
from ..host_context import HOST
from .arrays import (
    is_half,
    require_float32,
    require_same_size,
    require_sizes,
    unscaling_factor,
    which_are_half,
)
from .interface import (
    EXPONENT_BINS,
    ExponentHistogram,
    GradientsInPlace,
    GradientToUnscale,
    PackedArrays,
    RoundingStatistics,
    ScaledCopies,
)
from .random_rounding import rounded_at_random

SUM_LENGTH = (
    64  # nnabla sums one number after another in float32: short sums on the device, the rest in float64
)


class PlainKernels:
    """`Kernels` for any nnabla context.

    Each method reads its arrays many times and waits for the device.

    Args:
        context: where the functions run; of a half context, its float counterpart.

    Example:
        >>> import numpy as np
        >>> x = nn.NdArray.from_numpy_array(np.array([3.0, -0.5, 0.0], np.float32))
        >>> PlainKernels(nn.get_current_context()).statistics(x).abs_min
        0.5
    """

    def __init__(self, context: nn.Context) -> None:
        backend = [f"{name.partition(':')[0]}:float" for name in context.backend]
        # nnabla's default context names no array class; a cast wants one.
        array_class = context.array_class or HOST.array_class
        self._context = nn.Context(backend, array_class, context.device_id)

    @property
    def asynchronous(self) -> bool:
        return False

    @property
    def context(self) -> nn.Context:
        return self._context

    def statistics(self, x: NdArray) -> ArrayStatistics:
        is_half(x)
        if x.size == 0:
            return ArrayStatistics.of_zeros(0)
        with nn.context_scope(self._context):
            finite = F.logical_not(_nonfinite(x))
            values = F.where(finite, x, _full(x.shape, 0.0))
            magnitudes = F.abs(values)
            is_zero = F.equal_scalar(magnitudes, 0.0)  # non-finite elements among them
            abs_max = float(F.max(magnitudes).data)
            abs_min = _smallest(F.where(is_zero, _full(x.shape, math.inf), magnitudes))
            nonfinite = x.size - _count(finite)
            exponent = math.frexp(abs_max)[1]
            normalized = _times_power_of_two(values, -exponent)  # in [-1, 1]: no sum or square overflows
            return ArrayStatistics(
                count=x.size,
                sum=math.ldexp(_sum(normalized), exponent),
                sum_of_squares=math.ldexp(_sum(F.mul2(normalized, normalized)), 2 * exponent),
                abs_max=abs_max,
                abs_min=0.0 if abs_min == math.inf else abs_min,
                zeros=_count(is_zero) - nonfinite,
                nonfinite=nonfinite,
            )

    def statistics_all(self, arrays: Sequence[NdArray]) -> List[ArrayStatistics]:
        return [self.statistics(x) for x in arrays]

    def exponent_histogram(self, x: NdArray) -> Tuple[ArrayStatistics, ExponentHistogram]:
        statistics = self.statistics(x)
        with nn.context_scope(self._context):
            magnitudes = F.abs(x).data
        return statistics, np.bincount(magnitudes.view(np.uint32).ravel() >> 23, minlength=EXPONENT_BINS)

    def all_finite(self, arrays: Sequence[NdArray]) -> bool:
        return not any(self.statistics(x).nonfinite for x in arrays)

    def scaled_copy(self, source: NdArray, target: NdArray, alpha: float, *, half: bool = False) -> None:
        half = is_half(source) or half
        require_same_size(source, target)
        with nn.context_scope(self._context):
            product = F.mul_scalar(source, float(alpha))
            if half and source.size:  # nnabla's own cast to float16 is inexact below the normal range
                product = _rounded(product, FLOAT16)[0]
            target.copy_from(F.reshape(product, target.shape))
            target.cast(np.float16 if half else np.float32, self._context)

    def scaled_copy_all(self, copies: ScaledCopies) -> None:
        for source, target, alpha, half in copies.each:
            self.scaled_copy(source, target, alpha, half=half)

    def pack(self, arrays: Sequence[NdArray], packed: PackedArrays) -> None:
        require_sizes(arrays, packed.sizes)
        packed.halves = which_are_half(arrays)
        for x, place in zip(arrays, _places(packed)):
            place[...] = x.data.ravel()

    def unpack(self, packed: PackedArrays, arrays: Sequence[NdArray]) -> None:
        require_sizes(arrays, packed.sizes)
        for x, place, half in zip(arrays, _places(packed), packed.halves):
            x.data = place.reshape(x.shape).astype(np.float16 if half else np.float32)

    def scale_(self, x: NdArray, alpha: float) -> None:
        self.scaled_copy(x, x, alpha)

    def unscale_add(self, source: NdArray, master: NdArray, scale: float, *, accumulate: bool) -> float:
        factor = unscaling_factor(scale)
        is_half(source)
        require_same_size(source, master)
        with nn.context_scope(self._context):
            quotient = result = F.reshape(F.mul_scalar(source, factor), master.shape)
            if accumulate or source is master:
                require_float32(master, "master")
            if accumulate:
                result = F.add2(master, quotient)
            largest = self.statistics(quotient).abs_max
            master.copy_from(result)
        return math.inf if self.statistics(master).nonfinite else largest

    def unscale_add_all(self, gradients: Iterable[GradientToUnscale]) -> List[float]:
        return [self.unscale_add(g.source, g.master, g.scale, accumulate=g.accumulate) for g in gradients]

    def unscale_in_place(self, gradients: GradientsInPlace) -> List[float]:
        for x in gradients.arrays:
            x.cast(np.float32, self._context)
        return self.unscale_add_all(gradients.tasks)

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
        require_same_size(source, target)
        if source.size == 0:
            self.scaled_copy(source, target, 1.0)
            return RoundingStatistics(self.statistics(target), 0, 0)
        with nn.context_scope(self._context):
            if fitted:
                storage = storage.fitted_to(self.statistics(source).abs_max)
            inside = source
            if random_key is not None and storage.mantissa_bits < 23:
                inside = NdArray.from_numpy_array(rounded_at_random(source.data, storage, random_key))
            rounded, too_large = _rounded(inside, storage)
            if fitted:
                rounded = F.where(F.isinf(source), source, rounded)
            underflowed = _count(F.logical_and(F.equal_scalar(rounded, 0.0), F.not_equal_scalar(source, 0.0)))
            overflowed = _count(F.logical_and(too_large, F.logical_not(_nonfinite(source))))
            target.copy_from(F.reshape(rounded, target.shape))
        return RoundingStatistics(self.statistics(target), underflowed, overflowed)


def _places(packed: PackedArrays) -> List[Any]:
    starts = (packed.offsets // 4).tolist()
    values = packed.array.data
    return [values[start : start + size] for start, size in zip(starts, packed.sizes.tolist())]


def _full(shape: Tuple[int, ...], value: float) -> NdArray:
    array = NdArray(shape)
    array.fill(value)
    return array


def _nonfinite(x: NdArray) -> NdArray:
    return F.logical_or(F.isnan(x), F.isinf(x))


def _sum(x: NdArray) -> float:
    flat = F.reshape(x, (x.size,))
    rows = F.reshape(F.pad(flat, (0, -x.size % SUM_LENGTH)), (-1, SUM_LENGTH))
    return float(np.sum(F.sum(rows, axis=1).data, dtype=np.float64))


def _smallest(x: NdArray) -> float:
    return float(F.sort(F.reshape(x, (x.size,)))[0:1].data[0])  # nnabla's min starts from 1e8


def _count(mask: NdArray) -> int:
    return int(_sum(mask))


def _times_power_of_two(x: NdArray, exponent: int) -> NdArray:
    """2^exponent * x, in two steps since 2^exponent itself may be too large or too small for float32."""
    return F.mul_scalar(F.mul_scalar(x, 2.0 ** (exponent // 2)), 2.0 ** (exponent - exponent // 2))


def _rounded(x: NdArray, storage: Format) -> Tuple[NdArray, NdArray]:
    """The rounded numbers, and which of `x` were too large.

    Write `x` as units * power, with power a power of two and units in [1, 2), or below it for subnormals.

    In [2^d, 2^(d+1)) float32 numbers are 2^(d-23) apart: adding 2^d and taking it away again leaves units
    with 23 - d bits behind the point, rounded half to even. Products with powers of two are exact.
    """
    dropped = 23 - storage.mantissa_bits
    if dropped == 0:
        return F.identity(x), F.isinf(x)
    magnitudes = F.abs(x)
    power = _full(x.shape, storage.smallest_normal)
    for bit in reversed(range(storage.exponent_bits)):
        larger = _times_power_of_two(power, 2**bit)
        power = F.where(F.greater_equal(magnitudes, larger), larger, power)
    units = F.add_scalar(F.add_scalar(F.div2(magnitudes, power), 2.0**dropped), -(2.0**dropped))
    rounded = F.mul2(units, power)
    too_large = F.logical_or(F.greater_scalar(rounded, storage.max), F.isinf(x))
    rounded = F.where(too_large, _full(x.shape, storage.beyond_max), rounded)
    negative = F.logical_or(
        F.less_scalar(x, 0.0), F.less_scalar(F.r_div_scalar(x, 1.0), 0.0)
    )  # 1 / -0.0 is -inf
    return F.where(negative, F.mul_scalar(rounded, -1.0), rounded), too_large
