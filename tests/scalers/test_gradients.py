# SPDX-License-Identifier: Apache-2.0
"""Gradients in NumPy arrays, NdArrays and Variables, as `LossScaler` divides and reads them."""

from __future__ import annotations

from typing import Any, Callable

import nnabla as nn
import numpy as np
import pytest

from nnabla_adaloss import LossScaler
from tests.imports import modules_looked_for


def nd(values: Any, dtype: Any = np.float32) -> nn.NdArray:
    array = nn.NdArray(np.shape(values))
    array.cast(dtype)[...] = values
    return array


def variable(values: Any, dtype: Any = np.float32) -> nn.Variable:
    v = nn.Variable(np.shape(values), need_grad=True)
    v.grad.cast(dtype)[...] = values
    return v


Maker = Callable[..., Any]
every_maker = pytest.mark.parametrize("make", [np.array, nd, variable])


def values_of(gradient: Any) -> np.ndarray:
    if isinstance(gradient, nn.Variable):
        gradient = gradient.grad
    return gradient.data if isinstance(gradient, nn.NdArray) else gradient


@every_maker
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_division_is_in_float32_or_float64_and_where_nnablas_arrays_stand(make: Maker, dtype: Any) -> None:
    wide = np.float64 if dtype is np.float64 else np.float32
    stored = np.array([2.0**-24, -0.0, 3.0, 65504.0], dtype)
    gradient = make(stored, dtype=dtype)
    result = LossScaler(3.0).unscale_gradient(gradient)
    assert values_of(result).dtype == wide
    np.testing.assert_array_equal(values_of(result), stored.astype(wide) / wide(3.0))
    assert np.signbit(values_of(result)[1])
    assert (result is gradient) == (make is not np.array)
    if make is np.array:
        np.testing.assert_array_equal(gradient, stored)


def test_a_lazily_zero_gradient_stays_lazily_zero() -> None:
    gradient, scaler = nd([1.0]), LossScaler(2.0)
    gradient.zero()
    assert scaler.unscale_gradients_and_check(gradient)
    assert scaler.scale == 2.0
    assert gradient.zeroing


def test_the_data_of_a_variable_is_not_touched() -> None:
    v = variable([2.0])
    v.d = 8.0
    LossScaler(2.0).unscale_gradient(v)
    assert (v.d[0], v.g[0]) == (8.0, 1.0)


@every_maker
@pytest.mark.parametrize(
    ("values", "expected"),
    [([1.0, np.nan], True), ([-np.inf, 1.0], True), ([65504.0, 0.0], False), (np.zeros((0, 2)), False)],
)
def test_infinities_and_nans_are_found(make: Maker, values: Any, expected: bool) -> None:
    assert LossScaler().has_overflow(make(values, dtype=np.float32)) is expected
    assert LossScaler().detect_overflow([nd([1.0]), make(values, dtype=np.float32)]) is expected


@pytest.mark.parametrize(
    ("gradients", "error", "message"),
    [
        ([], ValueError, "gradients is empty"),
        (None, TypeError, "gradients=None must be"),
        (3.0, TypeError, "gradients=3.0 must be"),
        ([np.ones(1), None], TypeError, r"gradients\[1\] is of type NoneType"),
        ([np.ones(1, np.int32)], TypeError, r"gradients\[0\] is of dtype int32"),
        (nn.Variable((1,), need_grad=True), ValueError, r"gradients\[0\] holds nothing yet: run backward"),
        ([np.ones(1), nn.Variable((1,))], ValueError, r"gradients\[1\] holds nothing yet"),
    ],
)
def test_what_is_refused_leaves_everything_as_it_was(gradients: Any, error: Any, message: str) -> None:
    scaler = LossScaler()
    for method in (scaler.unscale_gradients, scaler.unscale_gradients_and_check, scaler.detect_overflow):
        with pytest.raises(error, match=message):
            method(gradients)
    if isinstance(gradients, list) and len(gradients) == 2:
        np.testing.assert_array_equal(gradients[0], 1.0)
    assert scaler.total_updates == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_nnabla_arrays_are_read_where_they_are(dtype: Any) -> None:
    gradient = nn.NdArray.from_numpy_array(np.array([[2.0, -4.0]], dtype))
    with modules_looked_for() as looked_for:
        assert LossScaler(2.0).unscale_gradients_and_check(gradient)
    assert not looked_for
