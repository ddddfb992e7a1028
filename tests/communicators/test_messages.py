# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import nnabla as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nnabla import NdArray

from nnabla_adaloss.communicators.messages import (
    SMALL_ARRAY,
    Packer,
    array_list,
    floating_list,
    host_values,
    plan_messages,
    shapes_of,
)


@given(st.lists(st.integers(0, 60)).map(tuple), st.integers(0, 40), st.integers(1, 100))
def test_every_array_that_holds_something_is_in_one_message_that_is_not_too_long(sizes, small, longest):
    messages = plan_messages(sizes, small, longest)
    positions = [position for message in messages for position in message]
    assert sorted(positions) == [position for position, size in enumerate(sizes) if size]
    assert [message[0] for message in messages] == sorted(message[0] for message in messages)
    for message in messages:
        if len(message) > 1:
            assert all(sizes[position] <= small for position in message)
            assert sum(sizes[position] for position in message) <= longest


def test_small_arrays_share_a_message_across_a_large_one():
    assert plan_messages((1, 99, 1, 0, 2), small_array=10, message=100) == ((0, 2, 4), (1,))
    assert plan_messages((6, 6, 6, 6, 6), small_array=10, message=12) == ((0, 1), (2, 3), (4,))
    assert plan_messages((1, 1), small_array=0) == ((0,), (1,))
    assert plan_messages(()) == ()


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_exchange_reaches_every_value_in_its_dtype(pack, dtype):
    arrays = [NdArray(shape) for shape in ((2, 3), (), (SMALL_ARRAY + 1,), (0,))]
    for i, array in enumerate(arrays):
        array.cast(dtype)
        array.data = np.full(array.shape, i + 1, dtype)
    lengths = []

    def double(values):
        assert values.dtype == np.float32
        lengths.append(values.size)
        values *= 2

    Packer().exchange(arrays, double, pack=pack)
    assert lengths == ([7, SMALL_ARRAY + 1] if pack else [6, 1, SMALL_ARRAY + 1])
    for i, array in enumerate(arrays):
        assert array.dtype == dtype
        assert (array.data == 2 * (i + 1)).all()


def test_single_precision_array_alone_is_not_copied():
    array = NdArray((5,))
    array.data = np.ones(5, np.float32)
    seen = []
    Packer().exchange([array], lambda values: seen.append(values.ctypes.data), pack=True)
    assert seen == [array.data.ctypes.data]


def test_result_of_copied_arrays_can_be_dropped():
    arrays = [NdArray((2,)) for _ in range(2)]
    for array in arrays:
        array.data = np.ones(2, np.float32)
    Packer().exchange(arrays, lambda values: values.fill(7), pack=True, keep_result=False)
    assert all((array.data == 1).all() for array in arrays)


@pytest.mark.filterwarnings("error")
def test_overflow_of_the_narrow_dtype_is_an_infinity():
    array = NdArray((1,))
    array.cast(np.float16)
    Packer().exchange([array], lambda values: values.fill(65520), pack=True)
    assert np.isposinf(array.data[0])


def test_buffer_is_kept_between_calls():
    packer = Packer()
    arrays = [NdArray((10,)) for _ in range(3)]
    addresses = []
    for count in (3, 2, 3):
        packer.exchange(arrays[:count], lambda values: addresses.append(values.ctypes.data), pack=True)
    assert len(set(addresses)) == 1


# ---- what is sent


def test_values_leave_the_lazy_zero_flag():
    array = NdArray((3,))
    array.zero()
    assert (host_values(array) == np.zeros(3)).all()
    assert array.zeroing


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
