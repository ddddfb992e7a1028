# SPDX-License-Identifier: Apache-2.0
"""Gradients are as they were before a batch."""

from __future__ import annotations

from typing import Dict, Tuple

import nnabla as nn
import numpy as np
import pytest

from nnabla_adaloss.engine.kept_gradients import KeptGradients
from nnabla_adaloss.engine.leaf_arrays import leaf_arrays
from nnabla_adaloss.kernels import CpuKernels

pytestmark = pytest.mark.any_context


def leaves(*gradients: float) -> Dict[int, nn.Variable]:
    found = {}
    for gradient in gradients:
        v = nn.Variable((2,), need_grad=True)
        v.grad.zero()
        if gradient:
            v.g = gradient
        found[hash(v)] = v
    return found


@pytest.mark.parametrize("before", [(0.0, 0.0), (0.0, 2.0), (1.0, 2.0)])
def test_gradients_are_put_back(before: Tuple[float, float]) -> None:
    kept = KeptGradients(CpuKernels())
    for _ in range(2):
        variables = leaves(*before)
        kept.save(leaf_arrays(variables))
        for v in variables.values():
            v.g = 7.0
        kept.restore()
        assert [v.grad.zeroing for v in variables.values()] == [not value for value in before]
        assert [v.g.tolist() for v in variables.values()] == [[value] * 2 for value in before]


def test_they_are_put_back_to_the_arrays_that_held_them() -> None:
    variables = leaves(3.0)
    (v,) = variables.values()
    kept, own = KeptGradients(CpuKernels()), v.grad
    kept.save(leaf_arrays(variables))
    v.grad = nn.NdArray.from_numpy_array(np.full(2, 8.0, np.float32))
    own.fill(0.0)
    kept.restore()
    assert own.data.tolist() == [3.0, 3.0]
    assert v.g.tolist() == [8.0, 8.0]
