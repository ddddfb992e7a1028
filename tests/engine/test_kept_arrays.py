# SPDX-License-Identifier: Apache-2.0
"""What arrays hold, kept and put back in the same dtype."""

from __future__ import annotations

from typing import List

import nnabla as nn
import numpy as np
import pytest

from nnabla_adaloss.engine.kept_arrays import KeptArrays
from nnabla_adaloss.kernels import CpuKernels

pytestmark = pytest.mark.any_context


def arrays(*dtypes: type) -> List[nn.NdArray]:
    return [
        nn.NdArray.from_numpy_array(np.arange(3 * index).reshape(3, index).astype(dtype))
        for index, dtype in enumerate(dtypes)
    ]


def values(kept: List[nn.NdArray]) -> List[List[List[float]]]:
    return [x.data.tolist() for x in kept]


@pytest.mark.parametrize(
    "dtypes",
    [(np.float32,) * 4, (np.float32, np.float16) * 2, (np.float32, np.int32, np.float16, np.float64)],
)
def test_every_dtype_comes_back(dtypes: List[type]) -> None:
    kept, keeper = arrays(*dtypes), KeptArrays(CpuKernels())
    for round in range(2):
        before = [x.data.copy() for x in kept]
        keeper.save(kept)
        for x in kept:
            x.cast(np.float32)[...] = -1.0
        keeper.restore(kept)
        for x, one, dtype in zip(kept, before, dtypes):
            assert x.dtype == dtype
            assert x.data.tolist() == one.tolist()
            x.data = one + round + 1


def test_what_is_lazily_zero_is_so_again() -> None:
    kept, keeper = arrays(np.float32, np.float32, np.int32), KeptArrays(CpuKernels())
    kept[1].zero()
    keeper.save(kept)
    kept[1].data = np.full((3, 1), 5.0)
    keeper.restore(kept)
    assert kept[1].zeroing
    # Now that it is written, a kernel keeps it.
    kept[1].data = np.full((3, 1), 6.0, np.float32)
    keeper.save(kept)
    kept[1].fill(7.0)
    keeper.restore(kept)
    assert kept[1].data.tolist() == [[6.0]] * 3


def test_what_was_set_by_fill_is_kept() -> None:
    kept, keeper = arrays(np.float32, np.float32), KeptArrays(CpuKernels())
    kept[1].fill(4.0)
    keeper.save(kept)
    kept[1].fill(5.0)
    keeper.restore(kept)
    assert kept[1].data.tolist() == [[4.0]] * 3


def test_other_arrays_can_be_kept_later() -> None:
    keeper = KeptArrays(CpuKernels())
    for kept in (arrays(np.float32, np.float32), arrays(np.float32, np.float16, np.float32), []):
        before = values(kept)
        keeper.save(kept)
        for x in kept:
            x.zero()
        keeper.restore(kept)
        assert values(kept) == before


def test_it_is_put_back_to_the_arrays_that_are_given() -> None:
    kept, keeper = arrays(np.float32, np.float32), KeptArrays(CpuKernels())
    keeper.save(kept)
    others = arrays(np.float16, np.float16)
    others[1].fill(9.0)
    keeper.restore(others)
    assert values(others) == values(kept)
    assert others[1].dtype == np.float32


def test_nothing_is_put_back_before_anything_is_kept() -> None:
    kept = arrays(np.float32, np.float32)
    KeptArrays(CpuKernels()).restore(kept)
    assert values(kept) == [[[]] * 3, [[0.0], [1.0], [2.0]]]


def test_contents_take_the_place_of_what_was_kept() -> None:
    kept, keeper = arrays(np.float32, np.float32), KeptArrays(CpuKernels())
    keeper.save(kept)
    keeper.put([None, np.full((3, 1), 8.0, np.float32)])
    keeper.restore(kept)
    assert kept[0].zeroing
    assert kept[1].data.tolist() == [[8.0]] * 3
