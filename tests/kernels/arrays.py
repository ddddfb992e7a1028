# SPDX-License-Identifier: Apache-2.0
"""Arrays for the kernel tests, and what the kernels must make of them."""

from __future__ import annotations

import itertools
import math
from typing import Any, List, Sequence

import ml_dtypes
import nnabla as nn
import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from nnabla_adaloss.core.formats import BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, FLOAT16, Format
from nnabla_adaloss.core.statistics import ArrayStatistics, statistics_of
from nnabla_adaloss.kernels import Kernels, ScaledCopies

Array = NDArray[Any]

DTYPES = [np.float32, np.float16]
NARROW_DTYPES = {
    FLOAT16: np.float16,
    BFLOAT16: ml_dtypes.bfloat16,
    FLOAT8_E5M2: ml_dtypes.float8_e5m2,
    FLOAT8_E4M3: ml_dtypes.float8_e4m3fn,
}
SPECIAL_VALUES = [
    *(0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -2.5, 65504.0, -65520.0, 6e-8, 3e-8, -1e-7),
    *(1e-40, -1e-45, 3.4028235e38, -3.4028235e38, 2.0**-126, 448.0, 464.0, 465.0, 57344.0, 61440.0),
]

any_float32 = hnp.arrays(np.uint32, st.integers(0, 400), elements=st.integers(0, 2**32 - 1)).map(
    lambda bits: bits.view(np.float32)
)
any_float16 = hnp.arrays(np.uint16, st.integers(0, 400), elements=st.integers(0, 2**16 - 1)).map(
    lambda bits: bits.view(np.float16)
)
any_arrays = any_float32 | any_float16


def normal(length: int, dtype: Any = np.float32, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(length).astype(dtype)


def special_values(dtype: Any) -> Array:
    with np.errstate(over="ignore"):
        return np.array(SPECIAL_VALUES).astype(dtype)


def numbers_of(storage: Format) -> Array:
    """Every number of the format, as float32."""
    dtype = np.dtype(NARROW_DTYPES[storage])
    bits = np.uint16 if dtype.itemsize == 2 else np.uint8
    return np.arange(2 ** (8 * dtype.itemsize)).astype(bits).view(dtype).astype(np.float32)


def nd_array(values: object, dtype: object = np.float32) -> nn.NdArray:
    with np.errstate(over="ignore"):
        return nn.NdArray.from_numpy_array(np.asarray(values).astype(dtype))


def assert_statistics(actual: ArrayStatistics, values: Array) -> None:
    """Everything exact but the sums, which are good to 4e-6 of the sum of magnitudes."""
    expected = statistics_of(values)
    with np.errstate(invalid="ignore"):
        wide = values.astype(np.float64)
    magnitude = np.abs(wide[np.isfinite(wide)]).sum()
    assert abs(actual.sum - expected.sum) <= 4e-6 * magnitude
    assert abs(actual.sum_of_squares - expected.sum_of_squares) <= 4e-6 * expected.sum_of_squares
    assert actual._replace(sum=0, sum_of_squares=0) == expected._replace(sum=0, sum_of_squares=0)


def assert_same_floats(actual: Array, expected: Array) -> None:
    """Equal bit for bit, the payloads of NaNs aside."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
    numbers = ~np.isnan(expected)
    bits = np.uint32 if expected.dtype == np.float32 else np.uint16
    np.testing.assert_array_equal(actual[numbers].view(bits), expected[numbers].view(bits))


def check_rounded(
    kernels: Kernels,
    values: Array,
    storage: Format,
    expected: Array,
    too_large: Any = False,
    **options: Any,
) -> None:
    """See that values are rounded to those expected, in place and elsewhere, and what is told of it."""
    source, target = nd_array(values), nn.NdArray(values.shape)
    for result in (target, source):
        statistics, underflowed, overflowed = kernels.round_to_format(source, result, storage, **options)
        assert_same_floats(result.data, expected)
        assert_statistics(statistics, expected)
        assert underflowed == np.count_nonzero((values != 0) & (expected == 0))
        assert overflowed == np.count_nonzero(np.isfinite(values) & too_large)


def scaled(values: Array, alpha: float, dtype: Any = None) -> Array:
    """alpha * values in float32, rounded to a dtype; None: that of `values`."""
    with np.errstate(all="ignore"):
        product = values.astype(np.float32) * np.float32(alpha)
        return np.asarray(product.astype(dtype or values.dtype))


def everything(kernels: Kernels, values: Array, formats: Sequence[Format] = (FLOAT16,)) -> str:
    """What all kernels make of an array: the numbers that they return and the bytes that they write."""

    def bits(array: nn.NdArray) -> int:
        written = array.data
        written[np.isnan(written)] = np.nan  # whose payload may differ
        return hash(written.tobytes())

    x, size = nd_array(values, values.dtype), values.size
    statistics, counts = kernels.exponent_histogram(x)
    found: List[Any] = [
        statistics,
        counts.tolist(),
        kernels.statistics(x),
        math.isfinite(kernels.largest([x])),
    ]
    for flag in (False, True):
        target, master = nn.NdArray((size,)), nd_array(np.full(size, 0.25))
        kernels.scaled_copy_all(ScaledCopies([x], [target], [0.3], [flag]))
        found += [bits(target), kernels.unscale_add(x, master, 3.0, accumulate=flag), bits(master)]
    for storage, options in itertools.product(formats, ({}, {"fitted": True}, {"random_key": 2**63 + 1})):
        target = nn.NdArray((size,))
        found += [kernels.round_to_format(master, target, storage, **options), bits(target)]
    return repr(found)
