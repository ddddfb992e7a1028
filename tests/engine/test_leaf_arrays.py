# SPDX-License-Identifier: Apache-2.0
"""Gradients of leaves, asked for once."""

from __future__ import annotations

from typing import Dict

import nnabla as nn
import numpy as np

from nnabla_adaloss.engine.leaf_gradients import leaf_arrays


def leaves(count: int) -> Dict[int, nn.Variable]:
    found = [nn.Variable((2,), need_grad=True) for _ in range(count)]
    for v in found:
        v.grad.zero()
    return {hash(v): v for v in found}


def test_in_the_order_of_the_leaves() -> None:
    some = leaves(3)
    found = leaf_arrays(some)
    assert list(found.keys) == list(some)
    assert found.arrays == [v.grad for v in some.values()]


def test_whether_all_are_lazily_zero() -> None:
    some = leaves(3)
    assert leaf_arrays(some).all_zero
    list(some.values())[1].grad.data = np.zeros(2, np.float32)  # zeros, but not lazily
    assert not leaf_arrays(some).all_zero
    assert leaf_arrays({}).all_zero
