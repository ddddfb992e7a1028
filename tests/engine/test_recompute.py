# SPDX-License-Identifier: Apache-2.0
"""Activations that backward computes again are not read before it: gradients are those of nnabla's loop."""

from __future__ import annotations

from typing import Callable, Dict

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling
from tests.worlds.passes import look, settle
from tests.worlds.values import FLOAT, HALF, assert_equal, data, gradients, zero_grads

RNG = np.random.RandomState


def attention() -> nn.Variable:
    x = data(2, 4, 8)
    q, k, v = (PF.affine(x, 8, base_axis=2, name=name, rng=RNG(i)) for i, name in enumerate("qkv"))
    with nn.recompute():
        h = F.tanh(F.batch_matmul(F.softmax(F.batch_matmul(q, k, transpose_b=True)), v))
    return F.mean(PF.affine(h, 3, base_axis=2, name="out", rng=RNG(9)) ** 2)


def normalized_weight() -> nn.Variable:
    h = F.tanh(PF.affine(data(4, 5), 6, name="first", rng=RNG(1)))
    with nn.recompute():
        h = F.tanh(PF.affine(h, 6, name="a", apply_w=normalized, rng=RNG(0)))
    return F.mean(PF.affine(h, 2, name="b", rng=RNG(3)) ** 2)


def normalized(w: nn.Variable) -> nn.Variable:
    return PF.weight_normalization(w, dim=1, name="wn")


def residual() -> nn.Variable:
    h = PF.convolution(data(2, 3, 6, 6), 4, (3, 3), name="stem", rng=RNG(0))
    for index in range(2):
        with nn.recompute():
            inner = F.relu(PF.batch_normalization(h, name=f"bn{index}"))
            h = h + PF.convolution(inner, 4, (3, 3), pad=(1, 1), name=f"conv{index}", rng=RNG(index + 1))
    return F.mean(PF.affine(F.relu(h), 2, name="last", rng=RNG(3)) ** 2)


NETWORKS: Dict[str, Callable[[], nn.Variable]] = {
    f.__name__: f for f in (attention, normalized_weight, residual)
}


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("method", ["amax_history", "approx_range", "abs_range", "fixed"])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("network", NETWORKS)
def test_gradients_are_nnablas(network: str, half: bool, method: str, hooked: bool) -> None:
    nn.clear_parameters()
    with nn.context_scope(HALF if half else FLOAT):
        loss = NETWORKS[network]()
    zero_grads()
    # In half the loss gradient fits; scales are powers of two, and nothing is subnormal.
    scale = np.float32(2.0**12 if half else 1.0)
    loss.forward(clear_no_need_grad=True)
    loss.backward(scale, clear_buffer=True)
    expected = {name: v.g.astype(np.float32) / scale for name, v in nn.get_parameters().items()}
    scaling = AdaptiveLossScaling(loss, AdaLossConfig(method, fixed_loss_scale=4.0, use_bound=False))
    hooks = {"function_post_hook": look} if hooked else {}
    for iteration in range(3):
        settle(scaling, iteration, **hooks)
        if half:
            for name, gradient in gradients().items():
                close = 2e-2 * np.abs(expected[name]).max()
                assert np.abs(gradient - expected[name]).max() <= close, name
        else:
            assert_equal(gradients(), expected)
