# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import nnabla as nn
import numpy as np
import pytest
from nnabla import NdArray

from nnabla_adaloss.communicators.host_arrays import (
    array_list,
    dtype_of,
    floating_list,
    host_values,
    host_view,
    shapes_of,
)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int32, np.uint8])
@pytest.mark.parametrize("shape", [(3, 4), (), (1,), (0, 2)])
def test_view_is_the_memory_in_its_own_dtype(dtype, shape):
    array = NdArray(shape)
    array.cast(dtype)
    array.data = np.ones(shape, dtype)
    view = host_view(array)
    assert view.dtype == array.dtype == dtype
    assert view.shape == (array.size,)
    view[...] = 5
    assert (array.data == 5).all()
    assert array.dtype == dtype


def test_view_of_an_array_without_memory_is_single_precision():
    array = NdArray((3,))
    assert dtype_of(array) == np.float32
    assert host_view(array).dtype == np.float32


def test_view_clears_the_lazy_zero_flag_and_values_do_not():
    array = NdArray((3,))
    array.zero()
    assert (host_values(array) == np.zeros(3)).all()
    assert array.zeroing
    assert (host_view(array) == 0).all()
    assert not array.zeroing


def test_values_of_numbers_and_numpy_arrays():
    assert host_values(2.5).item() == 2.5
    array = np.arange(3)
    assert host_values(array) is array


def test_one_array_is_a_list_of_one():
    array = NdArray((2,))
    assert array_list(array) == [array]
    assert array_list((array, array)) == [array, array]
    assert shapes_of([array, NdArray(())]) == ((2,), ())


def test_variables_and_integers_are_refused_by_position():
    with pytest.raises(TypeError, match=r"element 1 is a Variable, not an NdArray.*`\.grad`"):
        array_list([NdArray(()), nn.Variable((2,))])
    integers = NdArray((2,))
    integers.cast(np.int32)
    with pytest.raises(TypeError, match="element 1 has dtype int32"):
        floating_list([NdArray((2,)), integers])
