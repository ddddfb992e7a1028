# SPDX-License-Identifier: Apache-2.0
"""What variables hold, kept and put back in the same dtype."""

from __future__ import annotations

from typing import List

import nnabla as nn
import numpy as np
import pytest

from nnabla_adaloss.engine.kept_data import KeptData
from nnabla_adaloss.kernels import CpuKernels


def variables(*dtypes: type) -> List[nn.Variable]:
    found = []
    for index, dtype in enumerate(dtypes):
        v = nn.Variable((3, index))
        v.data.data = np.arange(3 * index).reshape(v.shape).astype(dtype)
        found.append(v)
    return found


@pytest.mark.parametrize(
    "dtypes",
    [(np.float32,) * 4, (np.float32, np.float16) * 2, (np.float32, np.int32, np.float16, np.float64)],
)
def test_every_dtype_comes_back(dtypes: List[type]) -> None:
    kept = variables(*dtypes)
    keeper = KeptData(CpuKernels(), kept)
    for round in range(2):
        before = [v.data.data.copy() for v in kept]
        keeper.save()
        for v in kept:
            v.data.cast(np.float32)[...] = -1.0
        keeper.restore()
        for v, values, dtype in zip(kept, before, dtypes):
            assert v.data.dtype == dtype
            assert v.data.data.tolist() == values.tolist()
            v.data.data = values + round + 1


def test_what_is_lazily_zero_is_so_again() -> None:
    kept = variables(np.float32, np.float32)
    kept[1].data.zero()
    keeper = KeptData(CpuKernels(), kept)
    keeper.save()
    kept[1].d = 5.0
    keeper.restore()
    assert kept[1].data.zeroing
    # Now that it is written, a kernel keeps it.
    kept[1].d = 6.0
    keeper.save()
    kept[1].d = 7.0
    keeper.restore()
    assert kept[1].d.tolist() == [[6.0]] * 3


def test_what_a_variable_holds_is_found_where_it_is_then() -> None:
    (_, v) = kept = variables(np.float32, np.float32)
    keeper = KeptData(CpuKernels(), kept)
    keeper.save()
    v.data = nn.NdArray.from_numpy_array(np.full(v.shape, 9.0, np.float32))
    keeper.restore()
    assert v.d.tolist() == [[0.0], [1.0], [2.0]]


def test_nothing_is_put_back_before_anything_is_kept() -> None:
    (_, v) = kept = variables(np.float32, np.float32)
    KeptData(CpuKernels(), kept).restore()
    assert v.d.tolist() == [[0.0], [1.0], [2.0]]
