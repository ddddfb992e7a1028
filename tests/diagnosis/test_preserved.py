# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.random
import numpy as np

from nnabla_adaloss.diagnosis.preserved import preserved
from nnabla_adaloss.graph.graph import Graph
from nnabla_adaloss.kernels import CpuKernels


def test_data_gradients_and_random_numbers_are_put_back() -> None:
    x = nn.Variable.from_numpy_array(np.ones((4, 3), np.float32))
    loss = F.mean(F.dropout(PF.affine(x, 5, name="a"), 0.5) ** 2)
    W, drawn = nn.get_parameters()["a/affine/W"], F.randn(shape=(5,))
    W.grad.zero()
    nn.seed(3)
    drawn.forward()
    expected, before = drawn.d.copy(), W.d.copy()
    nn.seed(3)
    states = random.getstate(), nnabla.random.prng.get_state()[1].tobytes()
    with preserved(Graph(loss), CpuKernels()):
        x.d, W.d = 2.0, 0.0
        random.random()
        nnabla.random.prng.standard_normal(3)
        loss.forward()
        loss.backward()
    assert (x.d == 1.0).all()
    np.testing.assert_array_equal(W.d, before)
    assert W.grad.zeroing
    assert states == (random.getstate(), nnabla.random.prng.get_state()[1].tobytes())
    drawn.forward()
    np.testing.assert_array_equal(drawn.d, expected)


def test_forward_draws_the_same_numbers_again() -> None:
    loss = F.mean(F.randn(shape=(5,)) * nn.Variable.from_numpy_array(np.ones(5), need_grad=True))
    with preserved(Graph(loss), CpuKernels()) as draw_again:
        losses = []
        for _ in range(2):
            draw_again()
            loss.forward()
            losses.append(float(loss.d))
    assert losses[0] == losses[1]


def test_unwritten_arrays_stay_unwritten() -> None:
    x = nn.Variable((4, 3))
    loss = F.mean(PF.affine(x, 5, name="a") ** 2)
    with preserved(Graph(loss), CpuKernels()):
        loss.forward()
    assert not x.data.modification_count
