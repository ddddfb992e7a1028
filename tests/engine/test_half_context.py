# SPDX-License-Identifier: Apache-2.0
"""The engine on nnabla's native half-precision arrays: cpu:half is slow, and real."""

from __future__ import annotations

from typing import Any, List

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling, FormatEmulation
from tests.worlds.passes import run, settle
from tests.worlds.values import FLOAT, HALF, Values, constant, data, gradients


def network(context: nn.Context, weight: float = 1.0) -> nn.Variable:
    nn.clear_parameters()
    rng = np.random.RandomState(0)
    x, t = constant(rng.randn(4, 2, 6, 6).astype(np.float16)), constant(rng.randint(0, 3, (4, 1)))
    with nn.context_scope(context):
        h = F.tanh(PF.convolution(x, 3, (3, 3), name="conv", rng=rng))
        h = F.tanh(PF.batch_normalization(h, name="bn"))
        h = F.tanh(PF.affine(h, 6, name="a", rng=rng)) + PF.affine(h, 6, name="b", rng=rng)
        return F.mean(F.softmax_cross_entropy(PF.affine(h, 3, name="c", rng=rng), t)) * weight


def errors(found: Values, exact: Values) -> List[float]:
    names = ("conv/conv/W", "a/affine/W", "c/affine/W")
    return [float(np.linalg.norm(found[n] - exact[n]) / np.linalg.norm(exact[n])) for n in names]


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("native", [False, True])
def test_layer_scales_save_what_half_precision_loses(native: bool, delay: int) -> None:
    exact = {name: 1e-6 * gradient for name, gradient in run(network(FLOAT), 1.0, clear=True).items()}
    loss: Any = network(HALF if native else FLOAT, 1e-6)
    if not native:
        loss = FormatEmulation(loss)
    assert min(errors(run(loss, 1.0, clear=True), exact)) > 0.1
    scaling = AdaptiveLossScaling(loss, AdaLossConfig(delay=delay))
    for iteration in range(2):
        settle(scaling, iteration, 1.0)
    assert max(errors(gradients(), exact)) < 0.05
    # They arrive in fp32.
    assert {array.dtype for v in nn.get_parameters().values() for array in (v.grad, v.data)} == {
        np.dtype(np.float32)
    }


@pytest.mark.parametrize("delay", [0, 1])
def test_scaled_weights_stay_in_range(delay: int) -> None:
    """A layer that shrinks its gradient by more than fp16 has room for in its weight."""
    nn.clear_parameters()
    rng = np.random.RandomState(0)
    with nn.context_scope(HALF):
        h = F.tanh(PF.affine(data(8, 16), 16, name="a", rng=rng))
        # Behind it gradients are 2^-20 of what they were, and its weights are not small: they cancel out.
        h = F.mul_scalar(PF.affine(h, 16, name="b", rng=rng), 2.0**-10)
        loss = F.mean(PF.affine(F.mul_scalar(h, 2.0**-10), 4, name="c", rng=rng) ** 2)
    weight = nn.get_parameters()["b/affine/W"]
    weight.d = weight.d * 2.0**6
    config = AdaLossConfig(loss_scale_method="amax_history", delay=delay, measure_every=1)
    scaling = AdaptiveLossScaling(loss, config)
    for iteration in range(6):
        settle(scaling, iteration, 8.0)
        for layer, alpha in scaling.layer_scales.items():
            assert alpha * np.abs(nn.get_parameters()[f"{layer}/W"].d).max() <= 65504.0
        assert scaling.found_inf == []
