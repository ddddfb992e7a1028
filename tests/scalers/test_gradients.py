# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import nnabla as nn
import numpy as np
import pytest

from nnabla_adaloss.scalers.gradients import (
    divisible_in_place,
    gradient_list,
    has_nonfinite,
    largest,
    unscaled,
)
from tests.imports import modules_looked_for


def nd(values, dtype=np.float32):
    array = nn.NdArray(np.shape(values))
    array.cast(dtype)[...] = values
    return array


def variable(values, dtype=np.float32):
    v = nn.Variable(np.shape(values), need_grad=True)
    v.grad.cast(dtype)[...] = values
    return v


MAKERS = [np.array, nd, variable]


def values_of(gradient):
    if isinstance(gradient, nn.Variable):
        gradient = gradient.grad
    return gradient.data if isinstance(gradient, nn.NdArray) else gradient


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_is_divided_in_float32(make, dtype):
    stored = np.array([2.0**-24, -0.0, 3.0, 65504.0], dtype)
    result = values_of(unscaled(make(stored, dtype=dtype), 1024.0))
    assert result.dtype == np.float32
    np.testing.assert_array_equal(result, stored.astype(np.float32) / 1024)
    assert np.signbit(result[1])


def test_float64_stays():
    result = unscaled(np.array([1e-300]), 3.0)
    assert result.dtype == np.float64
    assert result[0] == 1e-300 / 3.0


@pytest.mark.parametrize("make", [nd, variable])
def test_nnabla_arrays_are_divided_where_they_stand(make):
    gradient = make([2.0, 4.0])
    assert unscaled(gradient, 2.0) is gradient
    np.testing.assert_array_equal(values_of(gradient), [1.0, 2.0])


def test_numpy_arrays_are_left_as_they_are():
    gradient = np.array([2.0, 4.0], np.float32)
    unscaled(gradient, 2.0)
    np.testing.assert_array_equal(gradient, [2.0, 4.0])


def test_a_lazily_zero_gradient_stays_lazily_zero():
    gradient = nd([1.0])
    gradient.zero()
    unscaled(gradient, 2.0)
    assert not has_nonfinite(gradient)
    assert gradient.zeroing


def test_the_data_of_a_variable_is_not_touched():
    v = variable([2.0])
    v.d = 8.0
    unscaled(v, 2.0)
    assert (v.d[0], v.g[0]) == (8.0, 1.0)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    ("values", "expected"),
    [([1.0, np.nan], True), ([-np.inf, 1.0], True), ([65504.0, 0.0], False), (np.zeros((0, 2)), False)],
)
def test_has_nonfinite(make, values, expected):
    assert has_nonfinite(make(values, dtype=np.float32)) is expected


def test_divisible_in_place():
    fixed = np.ones(1, np.float32)
    fixed.flags.writeable = False
    assert [divisible_in_place(x) for x in (np.ones(1), np.ones(1, np.float32), nd([1.0], np.float16))] == [
        True
    ] * 3
    assert [divisible_in_place(x) for x in (np.ones(1, np.float16), fixed, np.float32(1))] == [False] * 3


def test_one_or_many():
    one = np.ones(2)
    assert gradient_list(one)[0] is one
    assert len(gradient_list((one, nd([1.0]), variable([1.0])))) == 3
    assert len(gradient_list({"a": one}.values())) == 1


@pytest.mark.parametrize(
    ("gradients", "error", "message"),
    [
        ([], ValueError, "gradients is empty"),
        (None, TypeError, "gradients=None must be"),
        (3.0, TypeError, "gradients=3.0 must be"),
        ([np.ones(1), None], TypeError, r"gradients\[1\] is of type NoneType"),
        ([np.ones(1, np.int32)], TypeError, r"gradients\[0\] is of dtype int32"),
        (nn.Variable((1,), need_grad=True), ValueError, r"gradients\[0\] holds nothing yet: run backward"),
    ],
)
def test_refused(gradients, error, message):
    with pytest.raises(error, match=message):
        gradient_list(gradients)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_nnabla_arrays_are_read_where_they_are(dtype):
    gradient = nn.NdArray.from_numpy_array(np.array([[2.0, -4.0]], dtype))
    with modules_looked_for() as looked_for:
        assert largest(gradient) == 4.0
        assert not has_nonfinite(gradient)
        assert unscaled(gradient, 2.0) is gradient
    assert not looked_for
    assert gradient.dtype == (np.float64 if dtype == np.float64 else np.float32)
    np.testing.assert_array_equal(gradient.data, [[1.0, -2.0]])
