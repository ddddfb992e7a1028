# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any, Tuple

import numpy as np
import pytest
from nnabla import NdArray

from nnabla_adaloss.host_context import dtype_of, host_view


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int32, np.uint8])
@pytest.mark.parametrize("shape", [(3, 4), (), (1,), (0, 2)])
def test_view_is_the_memory_in_its_own_dtype(dtype: Any, shape: Tuple[int, ...]) -> None:
    array = NdArray(shape)
    array.cast(dtype)
    array.data = np.ones(shape, dtype)
    view = host_view(array)
    assert view.dtype == array.dtype == dtype
    assert view.shape == (array.size,)
    view[...] = 5
    assert (array.data == 5).all()
    assert array.dtype == dtype


def test_view_of_an_array_without_values() -> None:
    array = NdArray((3,))
    assert dtype_of(array) == host_view(array).dtype == np.float32
    array.zero()
    assert (host_view(array) == 0).all()
    assert not array.zeroing


@pytest.mark.parametrize("before", [np.float64, np.float32, None])
def test_view_in_another_dtype_makes_the_array_hold_it(before: Any) -> None:
    array = NdArray((2,)) if before is None else NdArray.from_numpy_array(np.array([1.5, 2.5], before))
    if before is not None:
        np.testing.assert_array_equal(host_view(array, np.dtype(np.float32)), [1.5, 2.5])
    host_view(array, np.dtype(np.float32), write_only=True)[:] = [3.0, 4.0]
    assert array.dtype == np.float32
    np.testing.assert_array_equal(array.data, [3.0, 4.0])
