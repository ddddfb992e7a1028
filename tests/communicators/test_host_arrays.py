# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import nnabla as nn
import numpy as np
import pytest
from nnabla import NdArray

from nnabla_adaloss.communicators.host_arrays import (
    array_list,
    floating_list,
    host_values,
    shapes_of,
)


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
