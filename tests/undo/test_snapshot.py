# SPDX-License-Identifier: Apache-2.0
"""The contents of arrays, of variables and of gradients, and attributes, saved and restored."""

from __future__ import annotations

from typing import List

import nnabla as nn
import numpy as np
import pytest

from nnabla_adaloss.kernels import CpuKernels
from nnabla_adaloss.undo.snapshot import ArraySnapshot, savepoint

pytestmark = pytest.mark.any_context


def arrays(*dtypes: type) -> List[nn.NdArray]:
    return [
        nn.NdArray.from_numpy_array(np.arange(3 * index).reshape(3, index).astype(dtype))
        for index, dtype in enumerate(dtypes)
    ]


def values(kept: List[nn.NdArray]) -> List[List[List[float]]]:
    return [x.data.tolist() for x in kept]


def test_every_dtype_comes_back_to_as_many_arrays_as_there_are_now() -> None:
    snapshot = ArraySnapshot(CpuKernels())
    snapshot.restore()  # of nothing
    mixed = (np.float32, np.int32, np.float16, np.float64)
    for dtypes in ((np.float32,) * 4, (np.float32, np.float16) * 2, mixed, mixed[:3], ()):
        kept = arrays(*dtypes)
        before = values(kept)
        snapshot.save(kept)
        for x in kept:
            x.cast(np.float32)[...] = -1.0
        snapshot.restore()
        assert values(kept) == before
        assert [x.dtype for x in kept] == [*dtypes]


def test_lazily_zero_arrays_become_lazily_zero_again() -> None:
    kept, snapshot = arrays(np.float32, np.float32, np.int32), ArraySnapshot(CpuKernels())
    kept[1].zero()
    snapshot.save(kept)
    kept[1].data = np.full((3, 1), 5.0)
    snapshot.restore()
    assert kept[1].zeroing
    # Now that it is written, a kernel keeps it.
    kept[1].data = np.full((3, 1), 6.0, np.float32)
    snapshot.save(kept)
    kept[1].fill(7.0)
    snapshot.restore()
    assert kept[1].data.tolist() == [[6.0]] * 3


@pytest.mark.parametrize("all_zero", [False, True])
def test_new_contents_replace_the_kept_ones(all_zero: bool) -> None:
    kept, snapshot = arrays(np.float32, np.float32), ArraySnapshot(CpuKernels())
    snapshot.save(kept, all_zero=all_zero)
    snapshot.put([None, np.full((3, 1), 8.0, np.float32)])
    snapshot.restore()
    assert kept[0].zeroing
    assert kept[1].data.tolist() == [[8.0]] * 3


def test_data_is_restored_in_the_array_that_the_variable_has_then() -> None:
    v = nn.Variable.from_numpy_array(np.arange(3, dtype=np.float32))
    snapshot = ArraySnapshot(CpuKernels(), [v])
    snapshot.save()
    v.data = nn.NdArray.from_numpy_array(np.full(v.shape, 9.0, np.float32))
    snapshot.restore()
    assert v.d.tolist() == [0.0, 1.0, 2.0]
    v.d = 5.0
    snapshot.put([np.full(v.shape, 7.0, np.float32)])
    snapshot.restore()
    assert v.d.tolist() == [7.0] * 3


class Count:
    undone = "value", "parts"

    def __init__(self) -> None:
        self.value, self.parts, self.kept = 1, {"a": 1}, 1


def test_undoing_restores_the_same_arrays_each_time() -> None:
    one, other = Count(), Count()
    other.value = 5
    restore = savepoint([one, other])
    for _ in range(2):
        one.value, one.parts, one.kept, other.value = 2, {"b": 2}, 2, 6
        restore()
        assert (one.value, one.parts, one.kept, other.value) == (1, {"a": 1}, 2, 5)
