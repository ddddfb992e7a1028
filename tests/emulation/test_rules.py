# SPDX-License-Identifier: Apache-2.0
"""What is stored in half precision, function by function."""

from __future__ import annotations

from typing import Any, Callable, List, Sequence

import nnabla as nn
import nnabla.functions as F
import numpy as np
import pytest

from nnabla_adaloss import FormatEmulation
from nnabla_adaloss.emulation.rounding_plan import half_gradients, half_outputs, leaves_of
from tests.emulation.networks import is_half

Normalization = Callable[..., List[nn.Variable]]


def normalized(normalization: Normalization) -> List[nn.Variable]:
    """The output of a batch normalization, and the mean and the variance of the batch."""
    rng = np.random.default_rng(0)
    x = nn.Variable.from_numpy_array(rng.standard_normal((6, 3, 4, 4)).astype(np.float32), need_grad=True)
    beta, gamma, mean, variance = (nn.Variable((1, 3, 1, 1)) for _ in range(4))
    for v, value in ((beta, 0.1), (gamma, 1.1), (mean, 0.0), (variance, 1.0)):
        v.d = value
    outputs = normalization(x, beta, gamma, mean, variance, batch_stat=True, output_stat=True)
    for v in outputs:
        v.persistent = True
    return list(outputs)


@pytest.mark.parametrize("normalization", [F.batch_normalization, F.fused_batch_normalization])
def test_the_statistics_of_a_batch_are_outputs_that_stay_fp32(normalization: Normalization) -> None:
    outputs = normalized(normalization)
    f = outputs[0].parent
    assert len(f.outputs) == 3
    assert half_outputs(f) == f.outputs[:1]

    loss = FormatEmulation(F.sum(outputs[0]) + F.sum(outputs[1] * 0.0) + F.sum(outputs[2] * 0.0))
    loss.forward()
    assert [is_half(v.d) for v in outputs] == [True, False, False]


def test_all_outputs_of_other_functions_are_halves() -> None:
    x = nn.Variable.from_numpy_array(np.array([[0.1, 0.2, 0.3]], np.float32), need_grad=True)
    outputs = F.split(x * 1.0, axis=1)
    assert half_outputs(outputs[0].parent) == outputs[0].parent.outputs
    for v in outputs:
        v.persistent = True
    FormatEmulation(F.sum(F.add_n(*outputs))).forward()
    assert [is_half(v.d) for v in outputs] == [True] * 3


def leaf(*shape: int, need_grad: bool = True) -> nn.Variable:
    return nn.Variable(shape, need_grad=need_grad)


def places(found: Sequence[nn.Variable], f: Any) -> List[int]:
    """Which inputs of a function were found."""
    return [index for index, v in enumerate(f.inputs) if v in found]


def data(*shape: int) -> nn.Variable:
    return leaf(*shape, need_grad=False)


def normalized_by(function: Callable[..., Any], *shape: int, **more: nn.Variable) -> nn.Variable:
    """The statistics that are kept need no gradient."""
    return function(leaf(2, 3, 4), leaf(*shape), leaf(*shape), data(*shape), data(*shape), **more)


def convolution_with_normalization() -> nn.Variable:
    shape = 1, 4, 1, 1
    statistics = {"beta": leaf(*shape), "gamma": leaf(*shape), "mean": data(*shape), "variance": data(*shape)}
    return F.fused_convolution(leaf(2, 3, 5, 5), leaf(4, 3, 3, 3), **statistics)


@pytest.mark.parametrize(
    ("made", "half", "gradients"),
    [
        # The data of a product are read in half precision, need_grad or not.
        (lambda: F.affine(data(2, 3), leaf(3, 4), leaf(4)), [0, 1, 2], [1, 2]),
        (lambda: F.affine(leaf(2, 3) * 1.0, leaf(3, 4), data(4)), [1, 2], [0, 1]),
        # Arithmetic casts all that it reads.
        (lambda: F.add2(leaf(2, 3), data(2, 3)), [0, 1], [0]),
        # What needs no gradient may be a label.
        (lambda: F.sigmoid_cross_entropy(leaf(2, 3), data(2, 3)), [0], [0]),
        (lambda: F.softmax(leaf(2, 3)), [], []),
        # It reads its weights through references of its own, which no swap reaches.
        (
            lambda: F.lstm(leaf(2, 1, 3), leaf(1, 1, 1, 4), leaf(1, 1, 1, 4), leaf(1, 4, 4, 7))[0],
            [],
            [0, 1, 2, 3],
        ),
        (lambda: normalized_by(F.batch_normalization, 1, 3, 1), [0], [0]),
        (lambda: normalized_by(F.fused_batch_normalization, 1, 3, 1, z=leaf(2, 3, 4)), [0, 5], [0, 5]),
        (
            lambda: F.fused_convolution(leaf(2, 3, 5, 5), leaf(4, 3, 3, 3), bias=leaf(4)),
            [0, 1, 2],
            [0, 1, 2],
        ),
        (convolution_with_normalization, [0, 1], [0, 1]),
    ],
)
def test_which_leaves_are_read_and_which_gradients_are_written_in_half(
    made: Callable[[], nn.Variable], half: List[int], gradients: List[int]
) -> None:
    f = made().parent
    leaves = [index for index, v in enumerate(f.inputs) if v.parent is None]
    assert [places(found, f) for found in leaves_of(f)] == [half, [i for i in leaves if i not in half]]
    assert places(half_gradients(f), f) == gradients


def test_arithmetic_casts_no_data_to_less_than_16_bits() -> None:
    f = F.add2(leaf(2, 3), data(2, 3)).parent
    assert [places(found, f) for found in leaves_of(f, casts_data=False)] == [[0], [1]]


def test_a_gradient_between_two_functions_is_half_when_one_of_them_is() -> None:
    x = leaf(2, 3)
    inner = F.log_softmax(F.softmax(x * 2.0))
    assert half_gradients(inner.parent) == []
    assert half_gradients(inner.parent.inputs[0].parent) == inner.parent.inputs[0].parent.inputs
    assert half_gradients((inner * 2.0).parent) == [inner]


def test_a_gradient_that_is_written_twice_is_rounded_once() -> None:
    x = leaf(2, 3)
    assert half_gradients((x * x).parent) == [x]
