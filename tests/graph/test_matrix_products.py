# SPDX-License-Identifier: Apache-2.0
"""Fan-ins, counted: with ones everywhere an input gradient is the number of products it sums."""

from __future__ import annotations

from typing import Any, Callable

import nnabla as nn
import nnabla.functions as F
import numpy as np
import pytest

from nnabla_adaloss.graph.matrix_products import gemm_slots


def ones(*shape: int) -> nn.Variable:
    return nn.Variable.from_numpy_array(np.ones(shape, np.float32), need_grad=True)


CASES: dict[str, Callable[[], Any]] = {
    "affine": lambda: F.affine(ones(3, 4), ones(4, 5)),
    "affine_base_axis": lambda: F.affine(ones(3, 2, 4), ones(4, 5, 6), base_axis=2),
    "convolution": lambda: F.convolution(ones(2, 4, 60, 60), ones(6, 4, 3, 3)),
    "strided": lambda: F.convolution(ones(2, 4, 90, 90), ones(6, 4, 3, 3), stride=(2, 2)),
    "wide_stride": lambda: F.convolution(ones(1, 2, 90, 90), ones(6, 2, 2, 2), stride=(3, 3)),
    "grouped": lambda: F.convolution(ones(2, 4, 60, 60), ones(6, 2, 3, 3), group=2),
    "dilated": lambda: F.convolution(ones(2, 4, 90, 90), ones(6, 4, 3, 3), dilation=(2, 2)),
    "one_dimension": lambda: F.convolution(ones(2, 4, 400), ones(6, 4, 5)),
    "deconvolution": lambda: F.deconvolution(ones(2, 4, 8, 8), ones(4, 6, 3, 3)),
    "strided_deconvolution": lambda: F.deconvolution(
        ones(2, 4, 8, 8), ones(4, 3, 3, 3), stride=(2, 2), group=2
    ),
    "depthwise": lambda: F.depthwise_convolution(ones(2, 4, 60, 60), ones(8, 3, 3), multiplier=2),
    "strided_depthwise": lambda: F.depthwise_convolution(ones(2, 4, 90, 90), ones(4, 3, 3), stride=(2, 2)),
    "depthwise_deconvolution": lambda: F.depthwise_deconvolution(ones(2, 4, 8, 8), ones(4, 3, 3)),
    "batch_matmul": lambda: F.batch_matmul(ones(2, 3, 4), ones(2, 4, 5)),
    "transposed": lambda: F.batch_matmul(ones(2, 4, 3), ones(2, 5, 4), transpose_a=True, transpose_b=True),
    "broadcast": lambda: F.batch_matmul(ones(2, 1, 3, 4), ones(2, 7, 4, 5)),
}


@pytest.mark.parametrize("case", sorted(CASES))
def test_fan_in_is_the_number_of_products(case: str) -> None:
    y = CASES[case]()
    f = y.parent
    slots = gemm_slots(f.info.type_name, f.info.args, [v.shape for v in f.inputs], y.shape)
    assert slots
    y.forward()
    for v in f.inputs:
        v.grad.zero()
    y.backward(np.ones(y.shape, np.float32))
    for slot in slots:
        counted = f.inputs[slot.input].g
        assert slot.fan_in_bound == counted.max()
        # At the border fewer taps meet an element.
        assert counted.mean() == pytest.approx(slot.fan_in, rel=0.13)
        assert slot.fan_in <= slot.fan_in_bound


def test_what_is_no_matrix_product_has_no_slot() -> None:
    assert gemm_slots("ReLU", {}, [(2, 3)], (2, 3)) == []
