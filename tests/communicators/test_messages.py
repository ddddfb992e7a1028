# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import nnabla as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nnabla import NdArray

from nnabla_adaloss.communicators.messages import MESSAGE, SMALL_ARRAY, Packer, array_list, plan_messages


@given(st.lists(st.integers(0, 2 * SMALL_ARRAY)).map(tuple))
def test_every_array_that_holds_something_is_in_one_message_that_is_not_too_long(sizes):
    messages = plan_messages(sizes)
    positions = [position for message in messages for position in message]
    assert sorted(positions) == [position for position, size in enumerate(sizes) if size]
    assert [message[0] for message in messages] == sorted(message[0] for message in messages)
    for message in messages:
        if len(message) > 1:
            assert all(sizes[position] <= SMALL_ARRAY for position in message)
            assert sum(sizes[position] for position in message) <= MESSAGE


def test_small_arrays_share_a_message_across_a_large_one():
    large, small = SMALL_ARRAY + 1, SMALL_ARRAY
    assert plan_messages((1, large, small, 0, 2)) == ((0, 2, 4), (1,))
    assert plan_messages((small,) * 17) == (tuple(range(16)), (16,))
    assert plan_messages(()) == ()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_exchange_reaches_every_value_in_its_dtype(dtype):
    arrays = [NdArray(shape) for shape in ((2, 3), (), (SMALL_ARRAY + 1,), (0,))]
    for i, array in enumerate(arrays):
        array.cast(dtype)
        array.data = np.full(array.shape, i + 1, dtype)
    lengths = []

    def double(values):
        assert values.dtype == np.float32
        lengths.append(values.size)
        values *= 2

    Packer().exchange(arrays, double)
    assert lengths == [7, SMALL_ARRAY + 1]
    for i, array in enumerate(arrays):
        assert array.dtype == dtype
        assert (array.data == 2 * (i + 1)).all()


def test_single_precision_array_alone_is_not_copied():
    array, seen = NdArray.from_numpy_array(np.ones(5, np.float32)), []
    Packer().exchange([array], lambda values: seen.append(values.ctypes.data))
    assert seen == [array.data.ctypes.data]


@pytest.mark.filterwarnings("error")
def test_overflow_of_the_narrow_dtype_is_an_infinity():
    array = NdArray((1,))
    array.cast(np.float16)
    Packer().exchange([array], lambda values: values.fill(65520))
    assert np.isposinf(array.data[0])


def test_variables_and_integers_are_refused_by_position():
    with pytest.raises(
        TypeError, match=r"data\[1\] must be an NdArray, such as a Variable's \.grad, got Variable"
    ):
        array_list("data", [NdArray(()), nn.Variable((2,))])
    integers = NdArray((2,))
    integers.cast(np.int32)
    with pytest.raises(TypeError, match=r"data\[1\] has dtype int32"):
        array_list("data", [NdArray((2,)), integers], floating=True)
