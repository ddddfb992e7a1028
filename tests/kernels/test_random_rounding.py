# SPDX-License-Identifier: Apache-2.0
"""Rounding at random: what every backend makes of a key, and what comes of it on average."""

from __future__ import annotations

import nnabla as nn
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from nnabla_adaloss.core.formats import FLOAT8_E4M3, FLOAT8_E5M2, FLOAT16, FLOAT32, Format
from nnabla_adaloss.core.precision import stream_key
from nnabla_adaloss.kernels import CpuKernels, Kernels
from nnabla_adaloss.kernels.random_rounding import random_bits, rounded_at_random
from tests.kernels.arrays import (
    NARROW_DTYPES,
    SPECIAL_VALUES,
    assert_same_floats,
    assert_statistics,
    nd_array,
)

FORMATS = list(NARROW_DTYPES)
KEY = stream_key(7, 3)


def rounded(kernels: Kernels, values: np.ndarray, storage: Format, key: int = KEY) -> np.ndarray:
    target = nn.NdArray(values.shape)
    kernels.round_to_format(nd_array(values), target, storage, random_key=key)
    return target.data


def numbers_of(storage: Format) -> np.ndarray:
    """All finite numbers of the format, ascending."""
    dtype = np.dtype(NARROW_DTYPES[storage])
    bits = np.uint16 if dtype.itemsize == 2 else np.uint8
    values = np.arange(2 ** (8 * dtype.itemsize)).astype(bits).view(dtype).astype(np.float32)
    return np.unique(values[np.isfinite(values)])


def spread(length: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(length) * np.exp2(rng.uniform(-30, 6, length))).astype(np.float32)


@pytest.mark.parametrize("length", [0, 1, 2, 33, 5000, 9001])
@pytest.mark.parametrize("storage", FORMATS, ids=lambda storage: storage.name)
def test_all_backends_round_alike(kernels: Kernels, storage: Format, length: int) -> None:
    values = spread(length)
    expected = rounded_at_random(values, storage, KEY)
    source, target = nd_array(values), nn.NdArray(values.shape)
    for result in (target, source):
        rounding = kernels.round_to_format(source, result, storage, random_key=KEY)
        assert_same_floats(result.data, expected)
        assert_statistics(rounding.statistics, expected)
        assert rounding.underflowed == np.count_nonzero((values != 0) & (expected == 0))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    hnp.arrays(np.uint32, st.integers(0, 300), elements=st.integers(0, 2**32 - 1)),
    st.integers(0, 2**64 - 1),
    st.sampled_from(FORMATS),
    st.booleans(),
)
def test_to_a_neighbour_whatever_the_bits(
    kernels: Kernels, bits: np.ndarray, key: int, storage: Format, saturates: bool
) -> None:
    values = bits.view(np.float32)
    storage = storage.saturating(saturates)
    result = rounded(kernels, values, storage, key)
    numbers = numbers_of(storage.saturating(False)).astype(np.float64)
    inside = np.abs(values) <= storage.max
    place = np.searchsorted(numbers, values[inside], side="right")
    below = numbers[place - 1]
    above = np.where(below == values[inside], below, numbers[np.minimum(place, len(numbers) - 1)])
    assert ((result[inside] == below) | (result[inside] == above)).all()
    np.testing.assert_array_equal(np.signbit(result[inside]), np.signbit(values[inside]))
    # Beyond the largest number there is nothing to choose from.
    target = nn.NdArray(values.shape)
    kernels.round_to_format(nd_array(values), target, storage)
    assert_same_floats(result[~inside], target.data[~inside])


@pytest.mark.parametrize("storage", FORMATS, ids=lambda storage: storage.name)
def test_numbers_of_the_format_and_special_values_stay(kernels: Kernels, storage: Format) -> None:
    numbers = numbers_of(storage)[:: 1 if isinstance(kernels, CpuKernels) else 13]
    assert_same_floats(rounded(kernels, numbers, storage), numbers)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan], np.float32)
    expected = special.copy()
    expected[2:4] = np.copysign(storage.beyond_max, special[2:4])
    assert_same_floats(rounded(kernels, special, storage), expected)


@pytest.mark.parametrize("share", [2.0**-20, 0.01, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("storage", FORMATS, ids=lambda storage: storage.name)
@pytest.mark.parametrize("where", ["subnormal", "smallest", "normal", "largest"])
def test_the_mean_is_the_number(storage: Format, share: float, where: str) -> None:
    numbers = numbers_of(storage).astype(np.float64)
    first = np.searchsorted(numbers, 0.0)
    index = {"subnormal": first + 2, "smallest": first, "normal": len(numbers) * 3 // 4}.get(
        where, len(numbers) - 2
    )
    low, high = numbers[index], numbers[index + 1]
    number = np.float32(low + share * (high - low))
    exact = (float(number) - low) / (high - low)
    draws, length = 8, 1 << 18
    values = np.full(length, number)
    kernels = CpuKernels()
    ups = sum(
        np.count_nonzero(rounded(kernels, values, storage, stream_key(1, i)) == high) for i in range(draws)
    )
    count = draws * length
    assert abs(ups - exact * count) <= 5.0 * np.sqrt(exact * (1 - exact) * count) + 1e-9


def test_far_below_the_smallest_number_the_mean_stays() -> None:
    number = np.float32(FLOAT8_E5M2.smallest_subnormal * 2.0**-16 * 1.5)
    values = np.full(1 << 20, number)
    total = sum(
        rounded(CpuKernels(), values, FLOAT8_E5M2, stream_key(2, i)).sum(dtype=np.float64) for i in range(4)
    )
    expected = float(number) * 4 * (1 << 20)
    # About a hundred of four million become the smallest number.
    assert total == pytest.approx(expected, rel=0.5)


def test_a_key_and_an_index_decide_and_nothing_else(kernels: Kernels) -> None:
    values = spread(5000)
    once = rounded(kernels, values, FLOAT8_E5M2)
    assert_same_floats(rounded(kernels, values.reshape(50, 100), FLOAT8_E5M2).ravel(), once)
    assert_same_floats(rounded(kernels, values[:1234], FLOAT8_E5M2), once[:1234])
    assert (rounded(kernels, values, FLOAT8_E5M2, KEY + 1) != once).mean() > 0.1


def test_a_fitted_format_takes_the_same_numbers_for_every_power_of_two(kernels: Kernels) -> None:
    values = spread(3000)
    target = nn.NdArray(values.shape)
    kernels.round_to_format(nd_array(values), target, FLOAT8_E4M3, fitted=True, random_key=KEY)
    fitted = FLOAT8_E4M3.fitted_to(float(np.abs(values).max()))
    assert_same_floats(target.data, rounded_at_random(values, fitted, KEY))
    scaled = nn.NdArray(values.shape)
    kernels.round_to_format(
        nd_array(values * np.float32(2.0**-20)), scaled, FLOAT8_E4M3, fitted=True, random_key=KEY
    )
    assert_same_floats(scaled.data * np.float32(2.0**20), target.data)


def test_nothing_to_round(kernels: Kernels) -> None:
    values = np.array(SPECIAL_VALUES, np.float32)
    assert_same_floats(rounded(kernels, values, FLOAT32), values)


def test_random_bits_are_even() -> None:
    counts = np.zeros(32)
    for count in range(50):
        bits = random_bits(stream_key(0, count), 4000)
        assert len(np.unique(bits)) == 4000
        counts += ((bits[:, None] >> np.arange(32, dtype=np.uint32)) & 1).sum(axis=0)
    assert np.abs(counts - 100_000).max() < 5 * np.sqrt(200_000 / 4)
    # Neighbouring counts and neighbouring indices have nothing in common.
    table = np.array([random_bits(stream_key(0, count), 4000) for count in range(50)]) / 2.0**32
    for shifted in (table[1:, :] * table[:-1, :], table[:, 1:] * table[:, :-1]):
        assert abs(shifted.mean() - 0.25) < 5 * 0.22 / np.sqrt(shifted.size)


def test_half_even_is_what_there_is_without_a_key() -> None:
    target = nn.NdArray((2,))
    CpuKernels().round_to_format(nd_array([2049.0, 2051.0]), target, FLOAT16)
    np.testing.assert_array_equal(target.data, [2048.0, 2052.0])
