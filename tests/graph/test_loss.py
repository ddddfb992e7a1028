# SPDX-License-Identifier: Apache-2.0
"""Losses that can be wrapped, and the gradient that their backward starts from."""

from __future__ import annotations

import math
from typing import Any

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest

from nnabla_adaloss import AdaptiveLossScaling, FormatEmulation
from nnabla_adaloss.graph.loss import LossSeed, LossWrapper, check_scale, variable_of
from nnabla_adaloss.kernels import CpuKernels
from tests.worlds.values import constant


def output() -> nn.Variable:
    return PF.affine(constant(np.ones((2, 3))), 2, name="a")


def test_the_variable_behind_a_loss() -> None:
    loss = F.mean(output())
    emulation = FormatEmulation(loss)
    assert variable_of(loss) is loss
    assert variable_of(emulation) is loss
    assert variable_of(AdaptiveLossScaling(emulation)) is loss
    assert isinstance(emulation, LossWrapper)
    assert isinstance(AdaptiveLossScaling(loss), LossWrapper)


@pytest.mark.parametrize("loss", [None, 3.0, "loss", np.ones(1), nn.NdArray((1,))])
def test_objects_that_are_not_losses(loss: Any) -> None:
    with pytest.raises(TypeError, match=f"loss must be an nnabla.Variable.*{type(loss).__name__}"):
        variable_of(loss)


def test_losses_that_need_no_gradient() -> None:
    x = nn.Variable((2, 3))
    for loss in (x, F.mean(x), nn.Variable((1,), need_grad=True)):
        with pytest.raises(ValueError, match="needs no gradient"):
            variable_of(loss)


def test_a_loss_that_nnabla_takes_for_one_without_gradient_before_forward() -> None:
    x = nn.Variable((2, 3))
    loss = F.mean(F.tanh(x))
    x.rewire_on(F.tanh(nn.Variable((2, 3), need_grad=True)))
    assert not loss.need_grad
    assert variable_of(loss) is loss


@pytest.mark.parametrize("scale", [1, 8.0, np.float32(2.0), np.int64(4), np.array(0.5), 2.0**-126, 1e308])
def test_scales(scale: Any) -> None:
    found = check_scale(scale)
    assert found == float(scale)
    assert type(found) is float


@pytest.mark.parametrize(
    ("scale", "error"),
    [
        *((scale, ValueError) for scale in (0, -1.0, math.inf, math.nan, np.array(0.0), -0.0, 5e-324)),
        *((scale, TypeError) for scale in (None, "8", True, [8.0], np.array([8.0]), 1j)),
    ],
)
def test_numbers_that_are_not_scales(scale: Any, error: Any) -> None:
    with pytest.raises(error, match="factor="):
        check_scale(scale, "factor")


@pytest.mark.parametrize("clear_buffer", [False, True])
def test_one_array_serves_pass_after_pass(clear_buffer: bool) -> None:
    loss = F.mean(output())
    weight = nn.get_parameters()["a/affine/W"]
    own = np.float32(0.25) * np.ones((), np.float32)
    loss.g = own
    seed = LossSeed(loss, CpuKernels().scaled_float32)
    for scale in (8.0, 2.0**-20, 8.0):
        loss.forward()
        weight.grad.zero()
        filled = seed.gradient(scale)
        assert isinstance(filled, nn.NdArray)
        assert filled.dtype == np.float32
        loss.backward(filled, clear_buffer=clear_buffer)
        np.testing.assert_array_equal(weight.g, np.full((3, 2), 0.5 * scale, np.float32))
    np.testing.assert_array_equal(loss.g, own)  # nnabla has put the loss's own gradient back


def test_a_seed_of_a_batch_of_another_size() -> None:
    x = constant(np.ones((4, 3)))
    loss = F.sum(PF.affine(x, 1, name="a"), axis=1)
    weight = nn.get_parameters()["a/affine/W"]
    seed = LossSeed(loss, CpuKernels().scaled_float32)
    for batch in (4, 8, 2):
        x.reset_shape((batch, 3), True)
        x.d = 1.0
        loss.forward()
        weight.grad.zero()
        loss.backward(seed.gradient(8.0, nn.NdArray.from_numpy_array(np.ones(batch, np.float32))))
        np.testing.assert_array_equal(weight.g, np.full((3, 1), 8.0 * batch, np.float32))
