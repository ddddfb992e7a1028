# SPDX-License-Identifier: Apache-2.0
"""Rounding at random: every backend does what the definition says, whose random bits are even."""

from __future__ import annotations

from typing import Any

import nnabla as nn
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nnabla_adaloss.core.formats import FLOAT8_E4M3, FLOAT32, Format
from nnabla_adaloss.core.precision import Precision
from nnabla_adaloss.kernels import Kernels
from tests.kernels.arrays import (
    NARROW_DTYPES,
    SPECIAL_VALUES,
    any_float32,
    assert_same_floats,
    check_rounded,
    nd_array,
    numbers_of,
)

FORMATS = list(NARROW_DTYPES)
KEY = Precision(stochastic_seed=7).random_key(3)
every_format = pytest.mark.parametrize("storage", FORMATS, ids=lambda storage: storage.name)


def random_bits(key: int, count: int) -> np.ndarray:
    """32 random bits for each index below `count`: two rounds of the integer hash "lowbias32"."""
    low, high = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32)

    def mixed(x: np.ndarray) -> np.ndarray:
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
        x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
        return x ^ (x >> np.uint32(16))

    with np.errstate(over="ignore"):
        return mixed(mixed(np.arange(count, dtype=np.uint32) ^ low) + high)


def rounded_at_random(values: np.ndarray, storage: Format, key: int) -> np.ndarray:
    """The definition: up, if the random bits are less than the fraction. What is out of range stays."""
    wide = np.abs(values.astype(np.float64))
    inside = wide <= storage.max
    finite = np.where(inside, wide, 0.0)
    normal_exponent = np.frexp(storage.smallest_normal)[1] - 1
    unit = np.ldexp(1.0, np.maximum(np.frexp(finite)[1] - 1, normal_exponent) - storage.mantissa_bits)
    whole = np.floor(finite / unit)
    random = random_bits(key, values.size).reshape(values.shape)
    up = random < np.floor((finite / unit - whole) * 2.0**32)
    return np.where(inside, np.copysign((whole + up) * unit, values).astype(np.float32), values)


def rounded(
    kernels: Kernels, values: np.ndarray, storage: Format, key: Any = KEY, **options: Any
) -> np.ndarray:
    target = nn.NdArray(values.shape)
    kernels.round_to_format(nd_array(values), target, storage, random_key=key, **options)
    return target.data


def finite_numbers_of(storage: Format) -> np.ndarray:
    """All finite numbers of the format, ascending."""
    values = numbers_of(storage)
    return np.unique(values[np.isfinite(values)])


def spread(length: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return (rng.standard_normal(length) * np.exp2(rng.uniform(-30, 6, length))).astype(np.float32)


@every_format
def test_all_backends_round_alike(kernels: Kernels, storage: Format) -> None:
    for length in (0, 1, 2, 33, 5000, 2**16 + 9001):
        values = np.clip(spread(length), -storage.max, storage.max)
        check_rounded(kernels, values, storage, rounded_at_random(values, storage, KEY), random_key=KEY)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(any_float32, st.integers(0, 2**64 - 1), st.sampled_from(FORMATS), st.booleans())
def test_any_bit_pattern_and_any_key(
    kernels: Kernels, values: np.ndarray, key: int, storage: Format, saturates: bool
) -> None:
    storage = storage.saturating(saturates)
    result, expected = rounded(kernels, values, storage, key), rounded_at_random(values, storage, key)
    inside = np.abs(values) <= storage.max
    assert_same_floats(result[inside], expected[inside])
    # Beyond the largest number there is nothing to choose from.
    assert_same_floats(result[~inside], rounded(kernels, values, storage, None)[~inside])


@every_format
def test_numbers_of_the_format_and_special_values_stay(kernels: Kernels, storage: Format) -> None:
    numbers = finite_numbers_of(storage)
    assert_same_floats(rounded(kernels, numbers, storage), numbers)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan], np.float32)
    expected = special.copy()
    expected[2:4] = np.copysign(storage.beyond_max, special[2:4])
    assert_same_floats(rounded(kernels, special, storage), expected)
    values = np.array(SPECIAL_VALUES, np.float32)
    assert_same_floats(rounded(kernels, values, FLOAT32), values)


def test_a_fitted_format_takes_the_same_numbers_for_every_power_of_two(kernels: Kernels) -> None:
    values = spread(3000)
    found = rounded(kernels, values, FLOAT8_E4M3, fitted=True)
    power = np.float32(2.0 ** np.ceil(np.log2(np.abs(values).max() / FLOAT8_E4M3.max)))
    assert_same_floats(found, rounded_at_random(values / power, FLOAT8_E4M3, KEY) * power)
    scaled = rounded(kernels, values * np.float32(2.0**-20), FLOAT8_E4M3, fitted=True)
    assert_same_floats(scaled * np.float32(2.0**20), found)


def test_random_bits_are_even() -> None:
    rows = [random_bits(Precision(stochastic_seed=0).random_key(count), 4000) for count in range(50)]
    assert all(len(np.unique(bits)) == 4000 for bits in rows)
    table = np.array(rows)
    counts = ((table[..., None] >> np.arange(32, dtype=np.uint32)) & 1).sum(axis=(0, 1), dtype=np.float64)
    assert np.abs(counts - 100_000).max() < 5 * np.sqrt(200_000 / 4)
    # Neighbouring counts and neighbouring indices have nothing in common.
    shares = table / 2.0**32
    for products in (shares[1:, :] * shares[:-1, :], shares[:, 1:] * shares[:, :-1]):
        assert abs(products.mean() - 0.25) < 5 * 0.22 / np.sqrt(products.size)
