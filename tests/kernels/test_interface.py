# SPDX-License-Identifier: Apache-2.0
"""What `Kernels` promises, asked of every backend."""

from __future__ import annotations

import math
from typing import Any, List, Sequence

import nnabla as nn
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from nnabla_adaloss.core.formats import FLOAT8_E4M3, FLOAT16, FLOAT32, FORMATS, Format
from nnabla_adaloss.kernels import (
    EXPONENT_BINS,
    GradientsInPlace,
    GradientToUnscale,
    Kernels,
    PackedArrays,
    PlainKernels,
    ScaledCopies,
)
from tests.kernels.arrays import (
    NARROW_DTYPES,
    SPECIAL_VALUES,
    assert_same_floats,
    assert_statistics,
    nd_array,
    scaled,
)

DTYPES = [np.float32, np.float16]
LENGTHS = [0, 1, 2, 31, 33, 1023, 5000]
NARROW_FORMATS = list(NARROW_DTYPES)

float32_bits = hnp.arrays(np.uint32, st.integers(0, 400), elements=st.integers(0, 2**32 - 1))
float16_bits = hnp.arrays(np.uint16, st.integers(0, 400), elements=st.integers(0, 2**16 - 1))
arrays = st.one_of(
    float32_bits.map(lambda bits: bits.view(np.float32)), float16_bits.map(lambda bits: bits.view(np.float16))
)
powers_of_two = st.integers(-30, 30).map(lambda e: 2.0**e)
# The session's kernels hold no state between examples.
examples = settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def normal(length: int, dtype: type, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(length).astype(dtype)


def special_values(dtype: type) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.array(SPECIAL_VALUES).astype(dtype)


# ---- statistics


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_of_normal_numbers(kernels: Kernels, length: int, dtype: type) -> None:
    values = normal(length, dtype)
    assert_statistics(kernels.statistics(nd_array(values, dtype)), values)


@pytest.mark.parametrize("magnitude", [1e-45, 1e-38, 1e-22, 1e-15, 1e15, 1e22, 3e38])
def test_statistics_when_float32_cannot_hold_the_squares(kernels: Kernels, magnitude: float) -> None:
    values = (np.sign(normal(5000, np.float32)) * np.float32(magnitude)).astype(np.float32)
    assert_statistics(kernels.statistics(nd_array(values)), values)


def test_statistics_of_magnitudes_that_differ_between_blocks(kernels: Kernels) -> None:
    values = normal(20000, np.float32)
    values[:5000] *= np.float32(1e-25)
    values[9000:9100] *= np.float32(1e25)
    values[15000] = np.nan
    assert_statistics(kernels.statistics(nd_array(values)), values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_of_special_values(kernels: Kernels, dtype: type) -> None:
    values = special_values(dtype)
    assert_statistics(kernels.statistics(nd_array(values, dtype)), values)
    for value in values:
        assert_statistics(kernels.statistics(nd_array([value] * 3, dtype)), np.array([value] * 3))


@examples
@given(values=arrays)
def test_statistics_of_any_bit_pattern(kernels: Kernels, values: np.ndarray) -> None:
    assert_statistics(kernels.statistics(nd_array(values, values.dtype)), values)


def test_statistics_of_every_float16(kernels: Kernels) -> None:
    values = np.arange(65536, dtype=np.uint16).view(np.float16)
    assert_statistics(kernels.statistics(nd_array(values, np.float16)), values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_leave_the_array_as_it_was(kernels: Kernels, dtype: type) -> None:
    values = normal(33, dtype)
    x = nd_array(values, dtype)
    kernels.statistics(x)
    assert x.dtype == dtype
    assert_same_floats(x.data, values)


@examples
@given(values=arrays)
def test_exponent_histogram(kernels: Kernels, values: np.ndarray) -> None:
    statistics, counts = kernels.exponent_histogram(nd_array(values, values.dtype))
    assert_statistics(statistics, values)
    with np.errstate(invalid="ignore"):  # Signaling NaNs are among the values.
        wide = np.abs(values.astype(np.float32).astype(np.float64))
    expected = np.zeros(EXPONENT_BINS, np.int64)
    for value in wide:
        if not math.isfinite(value):
            expected[255] += 1
        else:
            expected[max(math.frexp(value)[1] - 1 + 127, 0) if value else 0] += 1
    np.testing.assert_array_equal(counts, expected)


# ---- scaling


@pytest.mark.parametrize("alpha", [1.0, 2.0**-24, 2.0**20, 0.3, 0.0])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scaling(kernels: Kernels, length: int, dtype: type, alpha: float) -> None:
    values = normal(length, dtype)
    values[:20] = special_values(dtype)[: min(length, 20)]
    source, target = nd_array(values, dtype), nn.NdArray((length,))
    kernels.scaled_copy(source, target, alpha)
    assert_same_floats(target.data, scaled(values, alpha))
    assert_same_floats(source.data, values)
    kernels.scale_(source, alpha)
    assert_same_floats(source.data, scaled(values, alpha))


@examples
@given(values=arrays, alpha=powers_of_two)
def test_scaled_copy_of_any_bit_pattern(kernels: Kernels, values: np.ndarray, alpha: float) -> None:
    target = nn.NdArray(values.shape)
    kernels.scaled_copy(nd_array(values, values.dtype), target, alpha)
    assert_same_floats(target.data, scaled(values, alpha))


@examples
@given(values=arrays, alpha=powers_of_two)
def test_scaled_copy_in_half(kernels: Kernels, values: np.ndarray, alpha: float) -> None:
    with np.errstate(all="ignore"):
        expected = (values.astype(np.float32) * np.float32(alpha)).astype(np.float16)
    source, target = nd_array(values, values.dtype), nn.NdArray(values.shape)
    kernels.scaled_copy(source, target, alpha, half=True)
    assert target.dtype == np.float16
    assert_same_floats(target.data, expected)
    assert source.dtype == values.dtype


def test_scaled_copy_reuses_the_target(kernels: Kernels) -> None:
    target = nn.NdArray((2, 3))
    kernels.scaled_copy(nd_array(np.ones((2, 3))), target, 2.0)
    kernels.scaled_copy(nd_array(np.ones((2, 3))), target, 4.0)
    np.testing.assert_array_equal(target.data, np.full((2, 3), 4.0, np.float32))


def test_sizes_must_agree(kernels: Kernels) -> None:
    with pytest.raises(ValueError, match=r"different sizes: \(3,\) and \(4,\)"):
        kernels.scaled_copy(nd_array([1, 2, 3]), nn.NdArray((4,)), 2.0)
    with pytest.raises(ValueError, match="different sizes"):
        kernels.unscale_add(nd_array([1, 2, 3]), nn.NdArray((4,)), 2.0, accumulate=False)
    with pytest.raises(ValueError, match="different sizes"):
        kernels.round_to_format(nd_array([1, 2, 3]), nn.NdArray((4,)), FLOAT16)


def test_other_dtypes_are_refused(kernels: Kernels) -> None:
    with pytest.raises(TypeError, match="int32"):
        kernels.statistics(nd_array([1, 2], np.int32))
    with pytest.raises(TypeError, match="source is float16"):
        kernels.round_to_format(nd_array([1, 2], np.float16), nn.NdArray((2,)), FLOAT16)
    with pytest.raises(TypeError, match="master is float16"):
        kernels.unscale_add(nd_array([1, 2]), nd_array([1, 2], np.float16), 1.0, accumulate=True)


# ---- looking for infinities


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bad_element_among_many_arrays(kernels: Kernels, dtype: type, bad: float) -> None:
    arrays = [normal(length, dtype) for length in (5000, 0, 1, 33)] + [np.array([65504.0, -0.0], dtype)]
    assert kernels.all_finite([nd_array(x, dtype) for x in arrays])
    for index, position in ((0, 4999), (2, 0), (4, 1)):
        spoilt = [x.copy() for x in arrays]
        spoilt[index][position] = bad
        assert not kernels.all_finite([nd_array(x, dtype) for x in spoilt])
    assert kernels.all_finite([nd_array(x, dtype) for x in arrays])
    assert kernels.all_finite([])


# ---- unscaling


@pytest.mark.parametrize("scale", [1.0, 2.0**14, 2.0**-3, 3.0, 1000.1])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_unscale_add(kernels: Kernels, length: int, dtype: type, scale: float) -> None:
    values, old = normal(length, dtype), normal(length, np.float32, seed=1)
    quotient = values.astype(np.float32) * np.float32(1.0 / scale)
    source, master = nd_array(values, dtype), nn.NdArray((length,))
    largest = float(np.abs(quotient).max(initial=0.0))
    assert kernels.unscale_add(source, master, scale, accumulate=False) == largest
    assert_same_floats(master.data, quotient)
    master = nd_array(old)
    assert kernels.unscale_add(source, master, scale, accumulate=True) == largest
    assert_same_floats(master.data, old + quotient)
    assert_same_floats(source.data, values)


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_unscale_in_place(kernels: Kernels, scale: float) -> None:
    values = normal(5000, np.float32)
    x = nd_array(values)
    largest = np.abs(values).max() / np.float32(scale)
    assert kernels.unscale_add(x, x, scale, accumulate=False) == largest
    assert_same_floats(x.data, values / np.float32(scale))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("position", [0, 17, 4999])
@pytest.mark.parametrize("dtype", DTYPES)
def test_found_inf_in_the_source(
    kernels: Kernels, dtype: type, position: int, bad: float, accumulate: bool
) -> None:
    values = normal(5000, dtype)
    values[position] = bad
    source, master = nd_array(values, dtype), nd_array(np.ones(5000))
    assert kernels.unscale_add(source, master, 2.0, accumulate=accumulate) == np.inf


def test_found_inf_in_place_with_scale_one(kernels: Kernels) -> None:
    x = nd_array([1.0, np.inf])
    assert kernels.unscale_add(x, x, 1.0, accumulate=False) == np.inf


def test_found_inf_in_the_result(kernels: Kernels) -> None:
    large = nd_array([3e38, 1.0])
    assert kernels.unscale_add(large, nn.NdArray((2,)), 0.25, accumulate=False) == np.inf
    assert kernels.unscale_add(large, nd_array([3e38, 1.0]), 1.0, accumulate=True) == np.inf
    assert kernels.unscale_add(large, nd_array([1.0, np.nan]), 1.0, accumulate=True) == np.inf


def test_the_master_is_not_read_without_accumulate(kernels: Kernels) -> None:
    master = nd_array([np.nan, np.inf])
    assert kernels.unscale_add(nd_array([2.0, 4.0]), master, 2.0, accumulate=False) == 2.0
    assert_same_floats(master.data, np.array([1.0, 2.0], np.float32))


@pytest.mark.parametrize("scale", [0.0, -1.0, np.inf, np.nan])
def test_scale_must_be_positive_and_finite(kernels: Kernels, scale: float) -> None:
    with pytest.raises(ValueError, match="scale="):
        kernels.unscale_add(nd_array([1.0]), nn.NdArray((1,)), scale, accumulate=False)


def test_statistics_all(kernels: Kernels) -> None:
    arrays = [nd_array(normal(n, dtype), dtype) for n in LENGTHS for dtype in DTYPES]
    arrays.append(nd_array([np.inf, 1.0, np.nan]))
    assert kernels.statistics_all(arrays) == [kernels.statistics(x) for x in arrays]
    assert kernels.statistics_all([]) == []


@pytest.mark.parametrize("to_half", [False, True])
@pytest.mark.parametrize("dtypes", [[np.float32], DTYPES])
def test_scaled_copy_all(kernels: Kernels, dtypes: Sequence[Any], to_half: bool) -> None:
    shapes = [(n,) for n in LENGTHS for _ in dtypes]
    alphas, half = [2.0**i for i in range(len(shapes))], [to_half] * len(shapes)
    copies = ScaledCopies((), (), alphas, half)
    for seed in range(3):
        # Contents, and where they are, change from pass to pass.
        copies.sources = [nd_array(normal(n, dtype, seed), dtype) for n in LENGTHS for dtype in dtypes]
        copies.targets = [nn.NdArray(shape) for shape in shapes]
        kernels.scaled_copy_all(copies)
        for source, target, alpha, _ in copies.each:
            one = nn.NdArray(source.shape)
            kernels.scaled_copy(source, one, alpha, half=to_half)
            assert target.dtype == one.dtype
            assert_same_floats(target.data, one.data)


def test_scaled_copies_of_other_types_and_sizes_than_before(kernels: Kernels) -> None:
    copies = ScaledCopies((), (), [2.0, 4.0], [False, False])
    floats = 2 * [np.float32]
    for dtypes, sizes in [(floats, (3, 4)), (floats, (5, 2)), (DTYPES, (5, 2)), (floats, (5, 2))]:
        copies.sources = [nd_array(normal(n, dtype), dtype) for n, dtype in zip(sizes, dtypes)]
        copies.targets = [nn.NdArray((n,)) for n in sizes]
        kernels.scaled_copy_all(copies)
        for source, target, alpha, _ in copies.each:
            assert target.dtype == source.dtype
            assert_same_floats(target.data, (source.data * np.float32(alpha)).astype(source.dtype))
    copies.targets = [nn.NdArray((n,)) for n in (5, 3)]
    with pytest.raises(ValueError, match="sizes"):
        kernels.scaled_copy_all(copies)


def test_no_scaled_copies(kernels: Kernels) -> None:
    kernels.scaled_copy_all(ScaledCopies((), (), [], []))


def test_packed_arrays_come_back_in_their_own_dtypes(kernels: Kernels) -> None:
    values = [normal(n, dtype) for n in LENGTHS for dtype in DTYPES] + [special_values(d) for d in DTYPES]
    arrays = [nd_array(v, v.dtype) for v in values]
    packed = PackedArrays([x.size for x in arrays])
    kernels.pack(arrays, packed)
    for index, x in enumerate(arrays):
        # nnabla may change the dtype, and move the array.
        x.data = np.full(x.shape, 7.0, DTYPES[index % 3 % 2])
    kernels.unpack(packed, arrays)
    for x, v in zip(arrays, values):
        assert x.dtype == v.dtype
        assert_same_floats(x.data, v)


@examples
@given(values=st.lists(arrays, max_size=4))
def test_packing_changes_no_bit_of_a_number(kernels: Kernels, values: List[np.ndarray]) -> None:
    kept = [nd_array(v, v.dtype) for v in values]
    packed = PackedArrays([x.size for x in kept])
    kernels.pack(kept, packed)
    for x in kept:
        x.zero()
    kernels.unpack(packed, kept)
    for x, v in zip(kept, values):
        assert_same_floats(x.data, v)


def test_arrays_of_other_sizes_are_not_packed(kernels: Kernels) -> None:
    x, packed = nd_array([1.0, 2.0]), PackedArrays([2])
    kernels.pack([x], packed)
    for other in ([nd_array([3.0])], [x, x], []):
        with pytest.raises(ValueError, match="other sizes"):
            kernels.pack(other, packed)
        with pytest.raises(ValueError, match="other sizes"):
            kernels.unpack(packed, other)
    kernels.pack([], PackedArrays([]))


def test_unscale_add_all(kernels: Kernels) -> None:
    gradients = [
        GradientToUnscale(nd_array([2.0, 4.0], np.float16), nd_array([1.0, 1.0]), 2.0, True),
        GradientToUnscale(nd_array([8.0]), nn.NdArray((1,)), 4.0, False),
        GradientToUnscale(nd_array([]), nn.NdArray((0,)), 4.0, False),
    ]
    assert kernels.unscale_add_all(gradients) == [2.0, 2.0, 0.0]
    assert_same_floats(gradients[0].master.data, np.array([2.0, 3.0], np.float32))
    assert_same_floats(gradients[1].master.data, np.array([2.0], np.float32))
    bad = GradientToUnscale(nd_array([np.inf]), nn.NdArray((1,)), 4.0, False)
    assert kernels.unscale_add_all([bad, *gradients])[0] == np.inf
    assert kernels.unscale_add_all([]) == []


def test_gradients_unscaled_in_place_again_and_again(kernels: Kernels) -> None:
    arrays = [nd_array(normal(n, np.float32)) for n in LENGTHS]
    scales = [2.0 ** (i - 3) for i in range(len(arrays))]
    gradients = GradientsInPlace(arrays, scales)
    for _ in range(2):  # what is kept from the first time serves the second
        before = [x.data.copy() for x in arrays]
        found = kernels.unscale_in_place(gradients)
        for x, one, scale in zip(arrays, before, scales):
            assert_same_floats(x.data, one * np.float32(1.0 / scale))
        assert found == [float(np.abs(x.data).max(initial=0.0)) for x in arrays]
    assert kernels.unscale_in_place(GradientsInPlace([], [])) == []
    with pytest.raises(ValueError, match="scale="):
        GradientsInPlace(arrays[:1], [0.0])


def test_unscale_in_place_looks_for_the_memory_each_time(kernels: Kernels) -> None:
    moved, half = nd_array([4.0]), nd_array([8.0])
    gradients = GradientsInPlace([half, moved], [2.0, 2.0])
    assert kernels.unscale_in_place(gradients) == [4.0, 2.0]
    moved.zero()
    moved.copy_from(nd_array([6.0]))
    half.cast(np.float16)
    assert kernels.unscale_in_place(gradients) == [2.0, 3.0]
    assert half.dtype == np.float32


def test_half_gradients_become_float32_where_they_are(kernels: Kernels) -> None:
    values = np.arange(2**16, dtype=np.uint16).view(np.float16)
    half = nd_array(values, np.float16)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        expected = values.astype(np.float32) * np.float32(2.0**-3)
    assert kernels.unscale_in_place(GradientsInPlace([half], [2.0**3])) == [np.inf]
    assert half.dtype == np.float32
    assert_same_floats(half.data, expected)


def test_half_gradients_are_not_their_own_masters(kernels: Kernels) -> None:
    half = nd_array([8.0, 4.0], np.float16)
    with pytest.raises(TypeError, match="master is float16"):
        kernels.unscale_add(half, half, 2.0, accumulate=False)
    assert half.data.dtype == np.float16
    assert half.data.tolist() == [8.0, 4.0]


@examples
@given(values=arrays, scale=powers_of_two)
def test_unscale_add_of_any_bit_pattern(kernels: Kernels, values: np.ndarray, scale: float) -> None:
    with np.errstate(all="ignore"):
        quotient = values.astype(np.float32) * np.float32(1.0 / scale)
        total = np.float32(1e-40) + quotient
    source, master = nd_array(values, values.dtype), nn.NdArray(values.shape)
    kernels.unscale_add(source, master, scale, accumulate=False)
    assert_same_floats(master.data, quotient)
    master = nd_array(np.full(values.shape, 1e-40))
    kernels.unscale_add(source, master, scale, accumulate=True)
    assert_same_floats(master.data, total)


def test_unscaling_keeps_subnormal_numbers(kernels: Kernels) -> None:
    values = np.array([1e-40, -1e-45, 2.0**-126, 3e-39], np.float32)
    for scale in (1.0, 2.0, 0.25):
        with np.errstate(under="ignore"):
            quotient = values / np.float32(scale)
        master = nn.NdArray(values.shape)
        assert kernels.unscale_add(nd_array(values), master, scale, accumulate=False) == quotient.max()
        assert_same_floats(master.data, quotient)
        kernels.unscale_add(nd_array(values), master, scale, accumulate=True)
        assert_same_floats(master.data, quotient + quotient)


# ---- rounding


def check_rounding(kernels: Kernels, values: np.ndarray, storage: Format) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        expected = values.astype(NARROW_DTYPES[storage.saturating(False)]).astype(np.float32)
    too_large = ~np.isnan(values) & ~np.isfinite(expected)
    if storage.saturates:
        expected = np.where(too_large, np.copysign(storage.max, values), expected).astype(np.float32)
    source, target = nd_array(values), nn.NdArray(values.shape)
    for result in (target, source):
        statistics, underflowed, overflowed = kernels.round_to_format(source, result, storage)
        assert_same_floats(result.data, expected)
        assert_statistics(statistics, expected)
        assert underflowed == np.count_nonzero((values != 0) & (expected == 0))
        assert overflowed == np.count_nonzero(np.isfinite(values) & too_large)


def neighbours(values: np.ndarray) -> np.ndarray:
    """The values and the midpoints between them, each with the float32 numbers on either side."""
    ordered = np.unique(values[np.isfinite(values)]).astype(np.float64)
    points = np.concatenate([ordered, (ordered[1:] + ordered[:-1]) / 2]).astype(np.float32)
    with np.errstate(over="ignore"):
        return np.concatenate(
            [points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-np.inf))]
        )


@pytest.mark.parametrize("storage", NARROW_FORMATS, ids=lambda storage: storage.name)
def test_rounding_around_every_number_of_a_format(kernels: Kernels, storage: Format) -> None:
    dtype = np.dtype(NARROW_DTYPES[storage])
    step = 7 if isinstance(kernels, PlainKernels) else 1  # its cost is per element
    patterns = np.arange(2 ** (8 * dtype.itemsize), dtype=np.uint16 if dtype.itemsize == 2 else np.uint8)[
        ::step
    ]
    check_rounding(kernels, neighbours(patterns.view(dtype).astype(np.float32)), storage)


@pytest.mark.parametrize("saturates", [False, True])
@pytest.mark.parametrize("storage", NARROW_FORMATS, ids=lambda storage: storage.name)
def test_rounding_at_the_edge_of_the_range(kernels: Kernels, storage: Format, saturates: bool) -> None:
    storage = storage.saturating(saturates)
    largest = np.float32(storage.max)
    step = np.float32(storage.max * 2.0**-storage.mantissa_bits / 2)
    beyond = np.linspace(
        largest, np.minimum(largest + 4 * step, np.finfo(np.float32).max), 4001, dtype=np.float32
    )
    check_rounding(kernels, np.concatenate([beyond, -beyond, [np.inf, -np.inf, np.nan, -0.0, 0.0]]), storage)


@pytest.mark.parametrize("storage", NARROW_FORMATS, ids=lambda storage: storage.name)
@examples
@given(bits=float32_bits)
def test_rounding_of_any_bit_pattern(kernels: Kernels, storage: Format, bits: np.ndarray) -> None:
    check_rounding(kernels, bits.view(np.float32), storage)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("storage", NARROW_FORMATS, ids=lambda storage: storage.name)
def test_rounding_of_ordinary_numbers(kernels: Kernels, storage: Format, length: int) -> None:
    values = normal(length, np.float32) * np.exp2(10 * normal(length, np.float32, seed=1) - 10)
    values[: length // 3] = 0
    check_rounding(kernels, values, storage)


def test_rounding_to_float32_changes_nothing(kernels: Kernels) -> None:
    values = np.array(SPECIAL_VALUES, np.float32)
    target = nn.NdArray(values.shape)
    statistics, underflowed, overflowed = kernels.round_to_format(nd_array(values), target, FLOAT32)
    assert_same_floats(target.data, values)
    assert_statistics(statistics, values)
    assert (underflowed, overflowed) == (0, 0)


def test_every_format_is_tested() -> None:
    assert {*NARROW_DTYPES, FLOAT32} == set(FORMATS.values())


# ---- rounding to a format that is fitted to the array


def rounded_in_float64(values: np.ndarray, storage: Format) -> np.ndarray:
    """The definition: times a power of two, rounded, and divided by it again."""
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
    rounded = np.where(np.abs(rounded) > storage.max, np.copysign(storage.beyond_max, wide), rounded)
    return np.where(finite, np.copysign(rounded, wide) * power, wide).astype(np.float32)


def check_fitted(kernels: Kernels, values: np.ndarray, storage: Format) -> None:
    expected = rounded_in_float64(values, storage)
    source, target = nd_array(values), nn.NdArray(values.shape)
    for result in (target, source):
        rounding = kernels.round_to_format(source, result, storage, fitted=True)
        assert_same_floats(result.data, expected)
        assert_statistics(rounding.statistics, expected)
        assert rounding.underflowed == np.count_nonzero((values != 0) & (expected == 0))


@pytest.mark.parametrize("saturates", [False, True])
@pytest.mark.parametrize("storage", NARROW_FORMATS, ids=lambda storage: storage.name)
@examples
@given(bits=float32_bits)
def test_fitted_rounding_of_any_bit_pattern(
    kernels: Kernels, storage: Format, saturates: bool, bits: np.ndarray
) -> None:
    check_fitted(kernels, bits.view(np.float32), storage.saturating(saturates))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("storage", NARROW_FORMATS, ids=lambda storage: storage.name)
def test_fitted_rounding_of_ordinary_numbers(kernels: Kernels, storage: Format, length: int) -> None:
    for magnitude in (1e-30, 1.0, 1e20):
        check_fitted(kernels, normal(length, np.float32) * np.float32(magnitude), storage)


@pytest.mark.parametrize("exponent", [-90, -7, 0, 1, 20])
@pytest.mark.parametrize("storage", NARROW_FORMATS[2:], ids=lambda storage: storage.name)
def test_fitted_rounding_around_every_number_times_a_power_of_two(
    kernels: Kernels, storage: Format, exponent: int
) -> None:
    numbers = np.arange(256, dtype=np.uint8).view(NARROW_DTYPES[storage]).astype(np.float32)
    values = neighbours(numbers)
    values = np.concatenate([values[np.abs(values) <= storage.max], np.array([0.0, -0.0], np.float32)])
    expected, target = nn.NdArray(values.shape), nn.NdArray(values.shape)
    kernels.round_to_format(nd_array(values), expected, storage)
    scaled_values = nd_array(values * np.float32(2.0**exponent))
    kernels.round_to_format(scaled_values, target, storage, fitted=True)
    assert_same_floats(target.data, expected.data * np.float32(2.0**exponent))


@pytest.mark.parametrize("saturates", [False, True])
def test_what_is_not_finite_stays_and_the_rest_is_fitted_to_the_finite(
    kernels: Kernels, saturates: bool
) -> None:
    storage = FLOAT8_E4M3.saturating(saturates)
    values = np.array([np.inf, 1.05, -np.inf, np.nan, -3.1, 0.0, -0.0], np.float32)
    target = nn.NdArray(values.shape)
    rounding = kernels.round_to_format(nd_array(values), target, storage, fitted=True)
    assert_same_floats(target.data, np.array([np.inf, 1.0, -np.inf, np.nan, -3.0, 0.0, -0.0], np.float32))
    assert rounding.statistics.nonfinite == 3
    assert rounding.overflowed == 0


@pytest.mark.parametrize("values", [[], [0.0, -0.0], [np.inf], [np.nan, 0.0], [3.3]])
def test_fitted_rounding_of_little(kernels: Kernels, values: list) -> None:
    check_fitted(kernels, np.array(values, np.float32), FLOAT8_E4M3)
