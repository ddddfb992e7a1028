# SPDX-License-Identifier: Apache-2.0
"""Contents of nnabla arrays are found without changing them; scratch arrays are used again."""

from __future__ import annotations

import nnabla as nn
import numpy as np
import pytest

from nnabla_adaloss.host_context import HOST
from nnabla_adaloss.kernels.arrays import (
    FLOAT32,
    ScratchPool,
    are_readable,
    as_float32,
    prepare_master,
    stored_dtype,
)
from tests.imports import modules_looked_for


def array_of(dtype: type, *shape: int) -> nn.NdArray:
    return nn.NdArray.from_numpy_array(np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype))


def test_unwritten_arrays_stay_lazily_zero_and_filled_ones_become_float32() -> None:
    zero, filled = nn.NdArray((3,)), nn.NdArray((3,))
    zero.zero()
    filled.fill(2.5)
    assert stored_dtype(zero) is None
    prepare_master(zero, HOST)
    assert zero.zeroing
    assert stored_dtype(filled) == FLOAT32
    np.testing.assert_array_equal(filled.data, np.full(3, 2.5, np.float32))
    assert filled.dtype == FLOAT32


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int32, np.uint8])
@pytest.mark.parametrize("shape", [(2, 3), (1,), (0, 3)])
def test_arrays_that_kernels_cannot_read_are_copied_and_stay_unchanged(
    dtype: type, shape: tuple[int, ...]
) -> None:
    array, copy = array_of(dtype, *shape), nn.NdArray(shape)
    with modules_looked_for() as looked_for:
        found = as_float32(array, copy)
    assert not looked_for
    assert found is (array if dtype in (np.float16, np.float32) else copy)
    assert stored_dtype(found) in (FLOAT32, np.float16)
    assert stored_dtype(array) == np.dtype(dtype)
    np.testing.assert_array_equal(found.data, array.data)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_a_master_becomes_float32_with_its_values(dtype: type) -> None:
    array = array_of(dtype, 4)
    prepare_master(array, HOST)
    assert stored_dtype(array) == FLOAT32
    np.testing.assert_array_equal(array.data, np.arange(4, dtype=np.float32))


def test_infinities_nans_and_signed_zeros_survive() -> None:
    values = np.array([np.inf, -np.inf, np.nan, -0.0, 5e-324, 1e300])
    with np.errstate(over="ignore"):
        expected = values.astype(np.float32)
    with np.errstate(over="raise"):  # too large numbers are no surprise, and cause no warning
        found = as_float32(nn.NdArray.from_numpy_array(values), nn.NdArray((6,))).data
    np.testing.assert_array_equal(found, expected)
    assert np.signbit(found[3])


def test_written_arrays_are_readable_and_those_that_need_a_closer_look_are_not() -> None:
    assert are_readable([array_of(np.float16, 2), array_of(np.float32, 2), array_of(np.float32, 0)])
    assert are_readable([])
    good, zero, filled = array_of(np.float32, 2), array_of(np.float32, 3), nn.NdArray((3,))
    zero.zero()
    filled.fill(2.5)
    for other in (zero, filled, array_of(np.float64, 2)):
        assert not are_readable([good, other])
    assert zero.zeroing


def test_one_array_per_shape_and_purpose() -> None:
    pool = ScratchPool()
    first = pool.get((2, 3), "scaled weight")
    assert first.shape == (2, 3)
    assert pool.get((2, 3), "scaled weight") is first
    others = [pool.get((3, 2), "scaled weight"), pool.get((2, 3), "gradient"), pool.get((2, 3), "factor", 1)]
    assert len({id(array) for array in (first, *others)}) == len(pool) == 4


def test_unused_entries_of_a_graph_are_dropped_with_the_next() -> None:
    pool = ScratchPool()
    weight = pool.get((2,), "scaled weight")
    for length in range(3, 20):
        pool.get((length,), "scaled weight")
        assert pool.get((2,), "scaled weight") is weight
        pool.end_graph()
        assert len(pool) == 2
    pool.end_graph()
    assert len(pool) == 0
    assert pool.get((2,), "scaled weight") is not weight
