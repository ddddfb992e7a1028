# SPDX-License-Identifier: Apache-2.0
"""A network written with the functions and one that the engine runs are the same network."""

from __future__ import annotations

from typing import Any, Callable, Optional, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest

from nnabla_adaloss import (
    AdaLossConfig,
    AdaptiveLossScaling,
    FormatEmulation,
    ScaleTracker,
    adaptive_loss_scaling,
    branch,
    loss_scaling,
    unscale,
)
from tests.functions.graphs import gradients, gradients_of
from tests.worlds.values import bits

# So large a u_min that every layer of these small networks gets a scale.
CONFIG = AdaLossConfig("approx_range", u_min=1e-3, scale_upper_bound=64.0, delay=0)


class Layers:
    """Layers by name, with scaling functions if there is a tracker, else as the engine takes them."""

    def __init__(self, tracker: Optional[ScaleTracker]) -> None:
        self.tracker = tracker

    def parameter(self, w: nn.Variable) -> nn.Variable:
        return unscale(w, self.tracker) if self.tracker else w

    def layer(self, function: Callable, h: nn.Variable, *args: Any, name: str, **options: Any) -> nn.Variable:
        own = {"apply_w": self.parameter, "apply_b": self.parameter, "rng": np.random.RandomState(len(name))}
        y = function(h, *args, name=name, **own, **options)
        return adaptive_loss_scaling(y, y.parent.inputs[1], self.tracker) if self.tracker else y

    def convolution(self, h: nn.Variable, name: str, n: int, kernel: int = 3, **options: Any) -> nn.Variable:
        pad = (kernel // 2,) * 2
        return self.layer(PF.convolution, h, n, (kernel, kernel), name=name, pad=pad, **options)

    def normalization(self, h: nn.Variable, name: str) -> nn.Variable:
        shape = 1, h.shape[1], 1, 1
        beta, gamma = (
            self.parameter(
                nn.parameter.get_parameter_or_create(f"{name}/{own}", shape, value, need_grad=True)
            )
            for own, value in (("beta", np.zeros(shape)), ("gamma", np.ones(shape)))
        )
        return F.batch_normalization(h, beta, gamma, nn.Variable(shape), nn.Variable(shape))

    def branch(self, h: nn.Variable, n: int) -> Tuple[nn.Variable, ...]:
        # nnabla's convolution adds to a gradient product by product; behind an identity it starts from zero.
        return branch(h, n, self.tracker) if self.tracker else tuple(F.identity(h) for _ in range(n))


def mlp(layers: Layers, rng: np.random.Generator) -> nn.Variable:
    h = nn.Variable.from_numpy_array(rng.standard_normal((16, 12)).astype(np.float32))
    for i in range(4):
        h = F.tanh(layers.layer(PF.affine, h, 12, name=f"fc{i}"))
    return layers.layer(PF.affine, h, 4, name="out")


def residual(layers: Layers, rng: np.random.Generator) -> nn.Variable:
    x = nn.Variable.from_numpy_array(rng.standard_normal((16, 3, 8, 8)).astype(np.float32))
    a, b = layers.branch(F.relu(layers.normalization(layers.convolution(x, "stem", 6), "bn")), 2)
    a = F.relu(layers.convolution(a, "conv1", 6))
    a, b = layers.branch(F.relu(layers.convolution(a, "conv2", 6) + b), 2)
    h = layers.convolution(a, "down", 8, stride=(2, 2))
    h = h + layers.convolution(b, "shortcut", 8, 1, stride=(2, 2))
    return layers.layer(PF.affine, F.relu(h), 4, name="out")


def loss_of(network: Callable, layers: Layers) -> nn.Variable:
    y = network(layers, np.random.default_rng(0))
    labels = nn.Variable.from_numpy_array(np.arange(y.shape[0])[:, None] % 4)
    loss = F.mean(F.softmax_cross_entropy(y, labels))
    return loss_scaling(loss, layers.tracker) if layers.tracker else loss


@pytest.mark.slow
@pytest.mark.gate
@pytest.mark.parametrize("network", [mlp, residual])
def test_gradients_are_those_of_the_engine(network: Callable) -> None:
    tracker = ScaleTracker(CONFIG, 8.0)
    hand = loss_of(network, Layers(tracker))
    engine = AdaptiveLossScaling(loss_of(network, Layers(None)), CONFIG)
    leaves = list(nn.get_parameters().values())
    by_hand = gradients_of(hand, *leaves, clear=True)
    # Scales of layers act from the second pass over a batch on.
    for again in (False, True):
        engine.forward(clear_no_need_grad=True)
        by_engine = gradients(
            leaves, lambda again=again: engine.backward(8.0, clear_buffer=True, rerun=again)
        )
    # The engine gives one scale to all that a skip connects; each branch by hand has its own.
    assert (tracker.layer_scales == engine.layer_scales) == (network is mlp)
    assert (tracker.accumulated_scales == engine.accumulated_scales) == (network is mlp)
    assert max(tracker.layer_scales.values()) > 1.0
    for name, a, b in zip(nn.get_parameters(), by_hand, by_engine):
        assert np.abs(a).max() > 0.0, name
        np.testing.assert_array_equal(bits(a), bits(b), err_msg=name)


def test_the_engine_refuses_a_graph_that_scales_itself() -> None:
    hand = loss_of(residual, Layers(ScaleTracker(CONFIG)))
    with pytest.raises(ValueError, match="loss scales itself already"):
        AdaptiveLossScaling(hand, CONFIG)


@pytest.mark.slow
@pytest.mark.gate
def test_emulated_storage_leaves_unscaled_gradients_in_fp32() -> None:
    exact = loss_of(residual, Layers(None))
    leaves = list(nn.get_parameters().values())
    expected = gradients_of(exact, *leaves)
    emulated = FormatEmulation(loss_of(residual, Layers(ScaleTracker(CONFIG, scale=2.0**10))))
    for name, a, b in zip(nn.get_parameters(), gradients_of(emulated, *leaves), expected):
        # A bias before batch normalization has a gradient of rounding noise.
        assert not name.endswith("/W") or np.linalg.norm(a - b) < 0.02 * np.linalg.norm(b), name
