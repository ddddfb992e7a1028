# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from typing import Any, List

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from nnabla_adaloss import ArrayStatistics
from nnabla_adaloss.core.statistics import combine, statistics_of

SPECIALS = np.array([[np.inf, np.nan, -np.inf], [-0.0, 0.0, -3.0], [2.0**-24, 1.0, 2.0]], np.float16)


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (SPECIALS, ArrayStatistics(9, 2.0**-24, 14.0 + 2.0**-48, 3.0, 2.0**-24, 2, 3)),
        (np.zeros((0, 3), np.float32), ArrayStatistics(0, 0.0, 0.0, 0.0, 0.0, 0, 0)),
        (np.float32(-2.0), ArrayStatistics(1, -2.0, 4.0, 2.0, 2.0, 0, 0)),
        (np.full(2, np.nan), ArrayStatistics(2, 0.0, 0.0, 0.0, 0.0, 0, 2)),
        (np.array([1e-45], np.float32), ArrayStatistics(1, 2.0**-149, 2.0**-298, 2.0**-149, 2.0**-149, 0, 0)),
        (np.full(10, 65504, np.float16), ArrayStatistics(10, 655040.0, 10 * 65504.0**2, 65504, 65504, 0, 0)),
    ],
)
def test_statistics_of_few_elements(x: Any, expected: ArrayStatistics) -> None:
    assert statistics_of(x) == expected


@pytest.mark.parametrize("count", [0, 1, 5])
def test_statistics_of_zeros(count: int) -> None:
    assert ArrayStatistics.of_zeros(count) == statistics_of(np.zeros(count))


def test_moments_are_of_the_finite_elements() -> None:
    s = statistics_of(np.array([1.0, 3.0, np.nan, np.inf]))
    assert (s.mean, s.mean_square, s.std, s.finite) == (2.0, 5.0, 1.0, False)
    s = statistics_of(np.array([np.nan]))
    assert (s.mean, s.mean_square, s.std) == (0.0, 0.0, 0.0)


def test_numpys_seterr_raise_does_not_disturb() -> None:
    signalling = np.array([0x7F800001, 0x3F800000], np.uint32).view(np.float32)
    with np.errstate(all="raise"):
        assert statistics_of(signalling)[:2] == (2, 1.0)
        assert statistics_of(np.full(2, 1.7e308))[1:3] == (math.inf, math.inf)


@pytest.mark.parametrize(
    ("values", "total"),
    [([1.7e308] * 2, math.inf), ([-1.7e308] * 2, -math.inf), ([1.7e308, -1.7e308] * 8, 0.0)],
)
def test_sums_beyond_float64_are_infinite(values: List[float], total: float) -> None:
    with np.errstate(all="raise"):
        whole = statistics_of(np.array(sorted(values)))
    by_sign = [statistics_of(np.array(values[start::2])) for start in (0, 1)]
    parts = [statistics_of(np.array(value)) for value in values]
    for found in (whole, combine(by_sign), combine(parts)):
        assert found is not None
        assert (found.sum, found.sum_of_squares, found.std) == (total, math.inf, math.inf)
        assert ArrayStatistics.from_list(list(found)) == found


finite32 = arrays(np.float32, st.integers(0, 20), elements=st.floats(-1e4, 1e4, width=32))


@given(finite32)
def test_mean_square_is_std_squared_plus_mean_squared(x: np.ndarray) -> None:
    s = statistics_of(x)
    assert math.isclose(s.mean_square, s.std**2 + s.mean**2, rel_tol=1e-9, abs_tol=1e-300)


@given(finite32, st.integers(-40, 40), st.sampled_from([1.0, -1.0]))
def test_scaled_by_a_power_of_two_is_exact(x: np.ndarray, exponent: int, sign: float) -> None:
    factor = sign * 2.0**exponent
    assert statistics_of(x).scaled(factor) == statistics_of(x.astype(np.float64) * factor)


# ---- put together

values = st.floats(-1e4, 1e4, width=32) | st.sampled_from([0.0, -0.0, math.inf, math.nan])
parts_of_an_array = st.lists(arrays(np.float32, st.integers(0, 8), elements=values), min_size=1, max_size=4)


@example([np.zeros(3, np.float32), np.float32([-0.5, 4.0])])
@given(parts_of_an_array)
def test_they_are_those_of_one_array(parts: List[np.ndarray]) -> None:
    pooled, whole = combine([statistics_of(part) for part in parts]), statistics_of(np.concatenate(parts))
    assert pooled is not None
    assert combine([]) is None
    assert pooled._replace(sum=0.0, sum_of_squares=0.0) == whole._replace(sum=0.0, sum_of_squares=0.0)
    # Rounded in another order.
    magnitudes = math.fsum(abs(float(x)) for part in parts for x in part if np.isfinite(x))
    assert math.isclose(pooled.sum, whole.sum, rel_tol=0.0, abs_tol=1e-12 * magnitudes)
    assert math.isclose(pooled.sum_of_squares, whole.sum_of_squares, rel_tol=1e-12)
