# SPDX-License-Identifier: Apache-2.0
"""What `Kernels` promises, asked of every backend."""

from __future__ import annotations

import itertools
from typing import Any, List, Tuple

import nnabla as nn
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nnabla_adaloss.core.formats import FLOAT8_E4M3, FLOAT8_E5M2, FLOAT16, FLOAT32, FORMATS, Format
from nnabla_adaloss.kernels import Kernels
from nnabla_adaloss.kernels.cpu_library import levels
from nnabla_adaloss.kernels.interface import EXPONENT_BINS, ScaledCopies, UnscalingList
from tests.kernels.arrays import (
    DTYPES,
    NARROW_DTYPES,
    SPECIAL_VALUES,
    any_arrays,
    any_float32,
    assert_same_floats,
    assert_statistics,
    check_rounded,
    nd_array,
    normal,
    numbers_of,
    scaled,
    special_values,
)
from tests.kernels.memory_array import anywhere

LENGTHS = [0, 1, 2, 31, 33, 1023, 5000]
NARROW_FORMATS = list(NARROW_DTYPES)

powers_of_two = st.integers(-30, 30).map(lambda e: 2.0**e)
# The session's kernels hold no state between examples.
examples = settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def copies_of(arrays: List[nn.NdArray]) -> ScaledCopies:
    return ScaledCopies(arrays, [nn.NdArray((x.size,)) for x in arrays], [1.0] * len(arrays))


every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_format = pytest.mark.parametrize("storage", NARROW_FORMATS, ids=lambda storage: storage.name)


def samples(dtype: Any) -> List[np.ndarray]:
    """Ordinary numbers, special values, each of them alone, and what float32 cannot hold the squares of."""
    special = special_values(dtype)
    signs = np.sign(normal(5000))
    wide = [
        (signs * np.float32(x)).astype(np.float32) for x in (1e-45, 1e-38, 1e-22, 1e-15, 1e15, 1e22, 3e38)
    ]
    every_half = np.arange(65536, dtype=np.uint16).view(np.float16)
    alone = [np.full(3, value, dtype) for value in special]
    more = wide if dtype == np.float32 else [every_half]
    return [*(normal(n, dtype) for n in LENGTHS), special, *alone, *more]


# ---- statistics


@every_dtype
def test_statistics(kernels: Kernels, dtype: type) -> None:
    for values in samples(dtype):
        x = nd_array(values, dtype)
        assert_statistics(kernels.statistics(x), values)
        assert_same_floats(x.data, values)


def test_statistics_of_magnitudes_that_differ_between_blocks(kernels: Kernels) -> None:
    values = normal(20000)
    values[:5000] *= np.float32(1e-25)
    values[9000:9100] *= np.float32(1e25)
    values[15000] = np.nan
    assert_statistics(kernels.statistics(nd_array(values)), values)


@examples
@given(values=any_arrays)
def test_exponents_and_statistics_of_any_bit_pattern(kernels: Kernels, values: np.ndarray) -> None:
    statistics, counts = kernels.exponent_histogram(nd_array(values, values.dtype))
    assert_statistics(statistics, values)
    assert_statistics(kernels.statistics(nd_array(values, values.dtype)), values)
    with np.errstate(invalid="ignore"):  # Signaling NaNs are among the values.
        wide = np.abs(values.astype(np.float64))
    exponents = np.frexp(np.where(np.isfinite(wide), wide, 0.0))[1] - 1 + 127
    bins = np.where(np.isfinite(wide), np.where(wide > 0, np.maximum(exponents, 0), 0), 255)
    np.testing.assert_array_equal(counts, np.bincount(bins, minlength=EXPONENT_BINS))


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@every_dtype
def test_one_bad_element_among_many_arrays(kernels: Kernels, dtype: type, bad: float) -> None:
    arrays = [normal(length, dtype) for length in (5000, 0, 1, 33)] + [np.array([65504.0, -0.0], dtype)]
    assert kernels.largest([nd_array(x, dtype) for x in arrays]) == 65504.0
    for index, position in ((0, 4999), (2, 0), (4, 1)):
        spoilt = [x.copy() for x in arrays]
        spoilt[index][position] = bad
        assert not np.isfinite(kernels.largest([nd_array(x, dtype) for x in spoilt]))
        mark = nd_array(np.float32([1.0, 2.0, 0.0]), np.float32)
        kernels.mark_nonfinite([nd_array(x, dtype) for x in spoilt], mark)
        assert mark.data[:2].tolist() == [1.0, 2.0]
        assert not np.isfinite(mark.data[2])
    finite, mark = [nd_array(x, dtype) for x in arrays], nd_array(np.zeros((2, 3)), np.float32)
    kernels.mark_nonfinite(finite, mark)
    assert np.isfinite(mark.data).all()
    assert kernels.largest(finite) == 65504.0
    assert kernels.largest([]) == 0.0


@every_dtype
def test_arrays_of_zeros_alone(kernels: Kernels, dtype: type) -> None:
    zeros = [np.zeros(length, dtype) for length in (5000, 0, 1)] + [np.array([-0.0, 0.0], dtype)]
    assert kernels.largest([nd_array(x, dtype) for x in zeros]) == 0.0
    smallest = np.finfo(dtype).smallest_subnormal
    for index, other in ((0, smallest), (2, -smallest), (3, np.nan), (0, np.inf)):
        spoilt = [x.copy() for x in zeros]
        spoilt[index][-1] = other
        assert kernels.largest([nd_array(x, dtype) for x in spoilt]) != 0.0


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int32])
def test_a_product_in_float32_of_an_array_of_any_dtype(kernels: Kernels, dtype: type) -> None:
    values, target = (1e3 * normal(100, np.float32)).astype(dtype), nn.NdArray((100,))
    source = nd_array(values, dtype)
    for alpha in (1.0, 2.0**16, 0.3):
        kernels.scaled_float32(source, target, alpha)
        assert_same_floats(target.data, values.astype(np.float32) * np.float32(alpha))
    assert source.dtype == dtype
    assert_same_floats(source.data, values)
    source.zero()
    kernels.scaled_float32(source, target, 2.0)
    assert_same_floats(target.data, np.zeros(100, np.float32))


@pytest.mark.parametrize("readable", [False, True])
def test_an_array_that_was_only_filled_is_read_as_float32(kernels: Kernels, readable: bool) -> None:
    filled = nn.NdArray((33,))
    filled.fill(2.5)
    arrays = [filled, nd_array(np.ones(3, np.float16), np.float16)] if readable else [filled]
    target = nn.NdArray((33,))
    kernels.scaled_copy_all(copies_of(arrays))
    assert kernels.statistics(filled).abs_max == 2.5
    kernels.scaled_copy(filled, target, 2.0)
    assert_same_floats(target.data, np.full(33, 5.0, np.float32))


# ---- scaling


def check_scaling(kernels: Kernels, values: np.ndarray, alpha: float) -> None:
    source = nd_array(values, values.dtype)
    for half in (False, True):
        with np.errstate(all="ignore"):
            expected = scaled(values, alpha) if not half else scaled(values, alpha, np.float16)
        target = nn.NdArray(values.shape)
        kernels.scaled_copy_all(ScaledCopies([source], [target], [alpha], [half]))
        assert_same_floats(target.data, expected)
    assert_same_floats(source.data, values)
    kernels.scale_(source, alpha)
    assert_same_floats(source.data, scaled(values, alpha))


@pytest.mark.parametrize("alpha", [1.0, 2.0**-24, 2.0**20, 0.3, 0.0])
@every_dtype
def test_scaling(kernels: Kernels, dtype: type, alpha: float) -> None:
    for length in LENGTHS:
        values = normal(length, dtype)
        values[:20] = special_values(dtype)[: min(length, 20)]
        check_scaling(kernels, values, alpha)


@examples
@given(values=any_arrays, alpha=powers_of_two)
def test_scaling_of_any_bit_pattern(kernels: Kernels, values: np.ndarray, alpha: float) -> None:
    check_scaling(kernels, values, alpha)


@pytest.mark.parametrize("to_half", [False, True])
def test_scaled_copy_all(kernels: Kernels, to_half: bool) -> None:
    count = len(LENGTHS)
    copies = ScaledCopies((), (), [2.0 ** (i - 3) for i in range(count)], [to_half] * count)
    floats, mixed = [np.float32] * count, [DTYPES[i % 2] for i in range(count)]
    # Contents, sizes, types and where arrays are change from pass to pass.
    passes = [(floats, 1), (floats, 1), (floats, -1), (mixed, -1), (floats, -1)]
    for seed, (dtypes, order) in enumerate(passes):
        values = [normal(n, dtype, seed) for n, dtype in zip(LENGTHS[::order], dtypes)]
        copies.sources = [nd_array(v, v.dtype) for v in values]
        copies.targets = [nn.NdArray(v.shape) for v in values]
        kernels.scaled_copy_all(copies)
        for v, source, target, alpha in zip(values, copies.sources, copies.targets, copies.alphas):
            assert_same_floats(target.data, scaled(v, alpha, np.float16 if to_half else None))
            assert_same_floats(source.data, v)
    copies.targets = [nn.NdArray((n,)) for n in LENGTHS]
    with pytest.raises(ValueError, match="sizes"):
        kernels.scaled_copy_all(copies)
    kernels.scaled_copy_all(ScaledCopies((), (), [], []))


# ---- what is refused


def test_sizes_must_agree(kernels: Kernels) -> None:
    with pytest.raises(ValueError, match=r"different sizes: \(3,\) and \(4,\)"):
        kernels.scaled_copy(nd_array([1, 2, 3]), nn.NdArray((4,)), 2.0)
    with pytest.raises(ValueError, match="different sizes"):
        kernels.unscale_add(nd_array([1, 2, 3]), nn.NdArray((4,)), 2.0, accumulate=False)
    with pytest.raises(ValueError, match="different sizes"):
        kernels.round_to_format(nd_array([1, 2, 3]), nn.NdArray((4,)), FLOAT16)


def test_other_dtypes_are_refused(kernels: Kernels) -> None:
    half = nd_array([8.0, 4.0], np.float16)
    with pytest.raises(TypeError, match="int32"):
        kernels.statistics(nd_array([1, 2], np.int32))
    with pytest.raises(TypeError, match="source is float16"):
        kernels.round_to_format(half, nn.NdArray((2,)), FLOAT16)
    for source, accumulate in ((nd_array([1, 2]), True), (half, False)):
        with pytest.raises(TypeError, match="master is float16"):
            kernels.unscale_add(source, half, 2.0, accumulate=accumulate)
    assert_same_floats(half.data, np.array([8.0, 4.0], np.float16))


@pytest.mark.parametrize("scale", [0.0, -1.0, np.inf, np.nan])
def test_scale_must_be_positive_and_finite(kernels: Kernels, scale: float) -> None:
    with pytest.raises(ValueError, match="scale="):
        kernels.unscale_add(nd_array([1.0]), nn.NdArray((1,)), scale, accumulate=False)
    with pytest.raises(ValueError, match="scale="):
        UnscalingList([nd_array([1.0])], [scale])


# ---- packing


@examples
@given(values=st.lists(any_arrays, max_size=4))
def test_copied_arrays_come_back_bit_for_bit_in_their_own_dtypes(
    kernels: Kernels, values: List[np.ndarray]
) -> None:
    values = [*values, *(normal(n, dtype) for n in LENGTHS for dtype in DTYPES)]
    arrays = [nd_array(v, v.dtype) for v in values]
    copies = copies_of(arrays)
    kernels.scaled_copy_all(copies)
    for index, x in enumerate(arrays):
        # nnabla may change the dtype, and move the array.
        x.data = np.full(x.shape, 7.0, DTYPES[index % 3 % 2])
        if index % 4 == 0:
            x.zero()
    kernels.scaled_copy_all(ScaledCopies(copies.targets, arrays, copies.alphas))
    for x, v in zip(arrays, values):
        assert_same_floats(x.data, v)
    # What is kept for these sizes serves other types.
    with np.errstate(over="ignore"):
        others = [v.astype(DTYPES[v.dtype == np.float32]) for v in values]
    copies.sources = [nd_array(v, v.dtype) for v in others]
    kernels.scaled_copy_all(copies)
    kernels.scaled_copy_all(ScaledCopies(copies.targets, arrays, copies.alphas))
    for x, v in zip(arrays, others):
        assert_same_floats(x.data, v)


# ---- unscaling


def check_unscaling(kernels: Kernels, values: np.ndarray, scale: float, old: np.ndarray) -> None:
    quotient = scaled(values, 1.0 / scale, np.float32)
    with np.errstate(all="ignore"):
        total = old + quotient
    # What was there is not read unless it is added to.
    for before, expected in ((np.full(values.shape, np.nan), quotient), (old, total)):
        source, master = nd_array(values, values.dtype), nd_array(before)
        found = kernels.unscale_add(source, master, scale, accumulate=expected is total)
        all_finite = np.isfinite(quotient).all() and np.isfinite(expected).all()
        assert found == (float(np.abs(quotient).max(initial=0.0)) if all_finite else np.inf)
        assert_same_floats(master.data, expected)
        assert_same_floats(source.data, values)
    if values.dtype == np.float32:
        kernels.unscale_add(source, source, scale, accumulate=False)
        assert_same_floats(source.data, quotient)


@pytest.mark.parametrize("scale", [1.0, 2.0**14, 2.0**-3, 3.0, 1000.1])
@every_dtype
def test_unscale_add(kernels: Kernels, dtype: type, scale: float) -> None:
    arrays = [normal(length, dtype) for length in LENGTHS]
    for position, bad in ((0, np.inf), (17, -np.inf), (4999, np.nan)):
        arrays.append(normal(5000, dtype))
        arrays[-1][position] = bad
    for values in (special_values(dtype), *arrays):
        check_unscaling(kernels, values, scale, normal(values.size, seed=1))


@examples
@given(values=any_arrays, scale=powers_of_two)
def test_unscale_add_of_any_bit_pattern(kernels: Kernels, values: np.ndarray, scale: float) -> None:
    check_unscaling(kernels, values, scale, np.full(values.shape, 1e-40, np.float32))


@pytest.mark.parametrize(("value", "old"), [(3e38, 3e38), (1.0, np.nan), (-1.0, -np.inf)])
def test_a_sum_that_is_not_finite_is_reported(kernels: Kernels, value: float, old: float) -> None:
    check_unscaling(kernels, np.float32([value, 1.0]), 1.0, np.float32([old, 1.0]))


# ---- rounding


def check_rounding(kernels: Kernels, values: np.ndarray, storage: Format) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        expected = values.astype(NARROW_DTYPES[storage.saturating(False)]).astype(np.float32)
    too_large = ~np.isnan(values) & ~np.isfinite(expected)
    if storage.saturates:
        expected = np.where(too_large, np.copysign(storage.max, values), expected).astype(np.float32)
    check_rounded(kernels, values, storage, expected, too_large)


def neighbours(values: np.ndarray) -> np.ndarray:
    """The values and the midpoints between them, each with the float32 numbers on either side."""
    ordered = np.unique(values[np.isfinite(values)]).astype(np.float64)
    points = np.concatenate([ordered, (ordered[1:] + ordered[:-1]) / 2]).astype(np.float32)
    with np.errstate(over="ignore"):
        return np.concatenate(
            [points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-np.inf))]
        )


@every_format
def test_rounding_around_every_number_of_a_format(kernels: Kernels, storage: Format) -> None:
    check_rounding(kernels, neighbours(numbers_of(storage)), storage)


@every_format
def test_rounding_at_the_edge_of_the_range(kernels: Kernels, storage: Format) -> None:
    largest = np.float32(storage.max)
    step = np.float32(storage.max * 2.0**-storage.mantissa_bits / 2)
    end = np.minimum(largest + 4 * step, np.finfo(np.float32).max)
    beyond = np.linspace(largest, end, 4001, dtype=np.float32)
    values = np.concatenate([beyond, -beyond, np.float32([np.inf, -np.inf, np.nan, -0.0, 0.0])])
    for saturates in (False, True):
        check_rounding(kernels, values, storage.saturating(saturates))


@every_format
@examples
@given(values=any_float32)
def test_rounding_of_any_bit_pattern(kernels: Kernels, storage: Format, values: np.ndarray) -> None:
    check_rounding(kernels, values, storage)


@every_format
def test_rounding_of_ordinary_numbers(kernels: Kernels, storage: Format) -> None:
    for length in LENGTHS:
        values = normal(length) * np.exp2(10 * normal(length, seed=1) - 10)
        values[: length // 3] = 0
        check_rounding(kernels, values, storage)


def test_rounding_to_float32_changes_nothing(kernels: Kernels) -> None:
    values = np.array(SPECIAL_VALUES, np.float32)
    check_rounded(kernels, values, FLOAT32, values)


def test_every_format_is_tested() -> None:
    assert {*NARROW_DTYPES, FLOAT32} == set(FORMATS.values())


# ---- rounding to a format that is fitted to the array


def fitted_in_float64(values: np.ndarray, storage: Format) -> Tuple[np.ndarray, np.ndarray]:
    """The definition: times a power of two, rounded, and divided by it again. And what was too large."""
    wide = values.astype(np.float64)
    finite = np.isfinite(wide)
    largest = np.abs(wide[finite]).max(initial=0.0)
    allowed = [
        2.0**e
        for e in range(-126, 127)
        if storage.smallest_normal * 2.0**e >= 2.0**-126
        and storage.smallest_normal * 2.0 ** (e + 23 - storage.mantissa_bits) <= 2.0**127
        and storage.max * 2.0**e < 2.0**128
    ]
    enough = [p for p in allowed if largest <= storage.max * p]
    power = 1.0 if largest == 0.0 else min(enough) if enough else max(allowed)
    scaled = np.where(finite, wide, 0.0) / power
    exponent = np.maximum(np.frexp(scaled)[1] - 1, np.frexp(storage.smallest_normal)[1] - 1)
    unit = np.ldexp(1.0, exponent - storage.mantissa_bits)
    rounded = np.rint(scaled / unit) * unit
    too_large = finite & (np.abs(rounded) > storage.max)
    rounded = np.where(too_large, np.copysign(storage.beyond_max, wide), rounded)
    return np.where(finite, np.copysign(rounded, wide) * power, wide).astype(np.float32), too_large


def check_fitted(kernels: Kernels, values: np.ndarray, storage: Format) -> None:
    check_rounded(kernels, values, storage, *fitted_in_float64(values, storage), fitted=True)


@every_format
@examples
@given(values=any_float32, saturates=st.booleans())
def test_fitted_rounding_of_any_bit_pattern(
    kernels: Kernels, storage: Format, saturates: bool, values: np.ndarray
) -> None:
    check_fitted(kernels, values, storage.saturating(saturates))


@every_format
def test_fitted_rounding_of_ordinary_numbers(kernels: Kernels, storage: Format) -> None:
    for length in LENGTHS:
        for magnitude in (1e-30, 1.0, 1e20):
            check_fitted(kernels, normal(length) * np.float32(magnitude), storage)


@pytest.mark.parametrize("storage", NARROW_FORMATS[2:], ids=lambda storage: storage.name)
def test_fitted_rounding_around_every_number_times_a_power_of_two(kernels: Kernels, storage: Format) -> None:
    values = neighbours(numbers_of(storage))
    for exponent in (-90, -7, 0, 1, 20):
        check_fitted(kernels, values[np.abs(values) <= storage.max] * np.float32(2.0**exponent), storage)


@pytest.mark.parametrize(
    "values",
    [
        [],
        [0.0, -0.0],
        [np.inf],
        [np.nan, 0.0],
        [3.3],
        [3.3e38],
        [np.inf, 1.05, -np.inf, np.nan, -3.1, 0.0, -0.0],
    ],
)
def test_fitted_rounding_of_tiny_and_nonfinite_numbers(kernels: Kernels, values: list) -> None:
    for storage, saturates in itertools.product((FLOAT8_E4M3, FLOAT8_E5M2), (False, True)):
        check_fitted(kernels, np.array(values, np.float32), storage.saturating(saturates))


# ---- memory


@pytest.mark.parametrize("kernels", [*levels(), "cuda on host"], indirect=True)
@pytest.mark.parametrize("length", [0, 1, 3, 4, 7, 8, 31, 33, 1023, 5000])
@every_dtype
def test_arrays_are_anywhere_and_nothing_beside_them_is_touched(
    kernels: Kernels, dtype: Any, length: int
) -> None:
    values = normal(length, dtype)
    values[: len(SPECIAL_VALUES)] = special_values(dtype)[:length]
    sources, targets, masters = anywhere(dtype, length), anywhere(dtype, length), anywhere(np.float32, length)
    for source, target, master in zip(sources, targets[1:] + targets[:1], masters[2:] + masters[:2]):
        source.values[:] = values
        assert_statistics(kernels.statistics(source), values)
        assert kernels.exponent_histogram(source)[0] == kernels.statistics(source)
        kernels.scaled_copy(source, target, 0.25)
        assert_same_floats(target.values, scaled(values, 0.25))
        kernels.scale_(target, 0.5)
        assert_same_floats(target.values, scaled(scaled(values, 0.25), 0.5))
        kernels.unscale_add(source, master, 4.0, accumulate=True)
        assert_same_floats(master.values, values.astype(np.float32) * np.float32(0.25) + np.float32(0))
        for options in ({}, {"fitted": True}, {"random_key": 1}):
            kernels.round_to_format(master, master, FLOAT8_E5M2, **options)


# ---- gradients

ONES, ZEROS = np.ones(3, np.float32), np.zeros(3, np.float32)


def with_gradients(*gradients: Any) -> List[nn.Variable]:
    made = []
    for gradient in gradients:
        v = nn.Variable((3,), need_grad=True)
        if gradient is None:
            v.grad.zero()
        else:
            v.grad = nn.NdArray.from_numpy_array(gradient)
        made.append(v)
    return made


@pytest.mark.parametrize(
    ("gradients", "zero"),
    [
        ((ZEROS, None), True),
        ((None,), True),
        ((-ZEROS, ZEROS.astype(np.float16)), True),
        ((ZEROS, ONES), False),
        ((ONES, None), False),
        ((ONES * 1e-45,), False),
        ((ZEROS, ONES.astype(np.float16)), False),
        ((ONES.astype(np.float64),), False),
        ((ZEROS.astype(np.float64),), True),
        ((ZEROS, ONES * np.nan), False),
    ],
)
def test_gradients_are_zero_when_no_element_is_anything_else(
    kernels: Kernels, gradients: Tuple[Any, ...], zero: bool
) -> None:
    assert kernels.gradients_are_zero(with_gradients(*gradients)) is zero


@pytest.mark.parametrize(
    ("bad", "dtype"),
    [(np.inf, np.float32), (-np.inf, np.float16), (np.nan, np.float32), (np.nan, np.float64)],
)
def test_gradients_with_one_element_that_is_not_finite(kernels: Kernels, bad: float, dtype: type) -> None:
    good = np.array([1.0, -2.0, 0.0], dtype)
    assert kernels.gradients_are_finite(with_gradients(good, good))
    assert not kernels.gradients_are_finite(with_gradients(good, np.array([1.0, 0.0, bad], dtype)))


def test_lazily_zero_gradients_are_finite_and_stay_so(kernels: Kernels) -> None:
    lazy, other = with_gradients(None, ONES)
    assert kernels.gradients_are_finite([lazy, other])
    assert lazy.grad.zeroing
