# SPDX-License-Identifier: Apache-2.0
"""What is known of leaves from pass to pass, and what each pass has written."""

from __future__ import annotations

from typing import List, Tuple

import nnabla as nn
import numpy as np
import pytest

from nnabla_adaloss.engine.leaf_gradients import LeafArrays, TakenLeaf, leaf_arrays
from nnabla_adaloss.engine.passes.hookless_leaves import HooklessLeaves
from nnabla_adaloss.kernels import CpuKernels

SCALES = [2.0, 8.0, 0.5]
POSITIONS = [7, 3, 5]


def taken(*, half: bool = False) -> Tuple[HooklessLeaves, List[nn.Variable]]:
    variables = [nn.Variable((2,), need_grad=True) for _ in SCALES]
    for v in variables:
        v.grad.zero()
    leaves = [
        TakenLeaf(position, 0, v, scale, half, False)
        for position, v, scale in zip(POSITIONS, variables, SCALES)
    ]
    return HooklessLeaves(leaves), variables


def found(variables: List[nn.Variable]) -> LeafArrays:
    return leaf_arrays({hash(v): v for v in variables})


def test_what_each_leaf_carries_goes_by_position() -> None:
    assert taken()[0].scales == dict(zip(POSITIONS, SCALES))


@pytest.mark.parametrize(
    ("half", "touched", "directly"), [(False, False, True), (True, False, False), (False, True, False)]
)
def test_when_nnabla_writes_to_the_masters(half: bool, touched: bool, directly: bool) -> None:
    leaves, variables = taken(half=half)
    if touched:
        variables[0].g = 1.0
    assert leaves.are_written_directly(found(variables)) == directly


def test_what_was_written_is_unscaled_and_the_rest_stays_lazily_zero() -> None:
    kernels = CpuKernels()
    leaves, variables = taken()
    for wrote in ([0, 1, 2], [0, 2], [], [0, 1, 2]):
        for v in variables:
            v.grad.zero()
        masters = found(variables).arrays
        for index in wrote:
            variables[index].grad.data = np.array([3.0, -4.0], np.float32)
        positions, gradients = leaves.written(masters)
        assert positions == [POSITIONS[index] for index in wrote]
        assert kernels.unscale_in_place(gradients) == [4.0 / SCALES[index] for index in wrote]
        for index, v in enumerate(variables):
            assert v.grad.zeroing == (index not in wrote)
            if index in wrote:
                np.testing.assert_array_equal(v.g, np.array([3.0, -4.0]) / SCALES[index])


def test_gradients_that_are_elsewhere_by_now() -> None:
    leaves, variables = taken()
    for _ in range(2):
        for v in variables:
            v.grad = nn.NdArray((2,))
            v.grad.data = np.full(2, 4.0, np.float32)
        _, gradients = leaves.written(found(variables).arrays)
        CpuKernels().unscale_in_place(gradients)
        assert [v.g.tolist() for v in variables] == [[4.0 / scale] * 2 for scale in SCALES]
