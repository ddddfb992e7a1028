# SPDX-License-Identifier: Apache-2.0
"""What a backward pass starts from."""

from __future__ import annotations

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest

from nnabla_adaloss.graph.loss_seed import LossSeed


def output() -> nn.Variable:
    return PF.affine(nn.Variable.from_numpy_array(np.ones((2, 3), np.float32)), 2, name="a")


def test_a_scale() -> None:
    seed = LossSeed(F.mean(output()))
    for scale in (8.0, 2.0**-20, 8.0):
        filled = seed.gradient(scale)
        assert isinstance(filled, nn.NdArray)
        assert filled.dtype == np.float32
        np.testing.assert_array_equal(filled.data, np.array(scale, np.float32))


def test_a_gradient_of_ones_own() -> None:
    seed = np.arange(4.0).reshape(2, 2)
    for given in (seed, nn.NdArray.from_numpy_array(seed), seed.astype(np.float16), seed.astype(int)):
        found = LossSeed(output()).gradient(4.0, given)
        assert isinstance(found, np.ndarray)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, 4.0 * seed)
    found = LossSeed(F.mean(output())).gradient(8.0, np.array(0.5))
    np.testing.assert_array_equal(found, np.array(4.0))


def test_what_does_not_fit() -> None:
    seed = LossSeed(output())
    with pytest.raises(ValueError, match=r"loss has shape \(2, 2\).*grad="):
        seed.gradient(1.0)
    for shape in [(3,), (4,), (2, 2, 1), (0,)]:
        with pytest.raises(ValueError, match=r"grad has shape .* but loss has shape \(2, 2\)"):
            seed.gradient(1.0, np.ones(shape))


@pytest.mark.parametrize("clear_buffer", [False, True])
def test_one_array_serves_pass_after_pass(clear_buffer: bool) -> None:
    loss = F.mean(output())
    weight = nn.get_parameters()["a/affine/W"]
    own = np.float32(0.25) * np.ones((), np.float32)
    loss.g = own
    seed = LossSeed(loss)
    for scale in (8.0, 2.0, 8.0):
        loss.forward()
        weight.grad.zero()
        loss.backward(seed.gradient(scale), clear_buffer=clear_buffer)
        np.testing.assert_array_equal(weight.g, np.full((3, 2), 0.5 * scale, np.float32))
    np.testing.assert_array_equal(loss.g, own)  # nnabla has put the loss's own gradient back
