# SPDX-License-Identifier: Apache-2.0
"""Networks that something is wrong with, each with what it is, and three that nothing is wrong with."""

from __future__ import annotations

from typing import Callable, Dict, NamedTuple, Optional, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.initializer as I
import nnabla.parametric_functions as PF
import numpy as np
from sklearn.datasets import load_digits

from nnabla_adaloss import Way

Feeder = Optional[Callable[[], None]]
Built = Tuple[nn.Variable, Feeder]


class Planted(NamedTuple):
    """A network with something wrong.

    Attributes:
        build: makes its loss and its feeder.
        layer: the layer that is to be named.
        kind: what is wrong.
        remedy: what the remedy is to speak of.
        needs: the least that keeps all gradients; None: no scale helps.
    """

    build: Callable[[], Built]
    layer: str
    kind: str
    remedy: str
    needs: Optional[Way]


def _rng(seed: int = 0) -> np.random.RandomState:
    return np.random.RandomState(seed)


def _affine(x: nn.Variable, size: int, name: str, factor: float = 1.0, bias: float = 0.0) -> nn.Variable:
    """He initialisation, times a factor."""
    std = factor * np.sqrt(2.0 / np.prod(x.shape[1:]))
    seed = sum(map(ord, name))
    return PF.affine(
        x,
        size,
        name=name,
        w_init=I.NormalInitializer(std, rng=_rng(seed)),
        b_init=I.ConstantInitializer(bias),
    )


def _data(x: nn.Variable, t: nn.Variable, classes: int, seed: int = 0) -> Callable[[], None]:
    rng = np.random.default_rng(seed)

    def feed() -> None:
        x.d = rng.standard_normal(x.shape)
        t.d = rng.integers(0, classes, t.shape)

    return feed


def _mlp(layers: Callable[[nn.Variable], nn.Variable], size: int = 16) -> Built:
    x, t = nn.Variable((32, size)), nn.Variable((32, 1))
    y = layers(x)
    return F.mean(F.softmax_cross_entropy(y, t)), _data(x, t, y.shape[1])


def scaled_layer() -> Built:
    """One layer's output is multiplied by 1e-6, and the next one's by 1e6."""

    def layers(x: nn.Variable) -> nn.Variable:
        h = F.relu(_affine(x, 32, "fc1"))
        h = F.relu(_affine(h, 32, "fc2"))
        h = _affine(h, 32, "small") * 1e-6
        h = F.tanh(PF.batch_normalization(h, name="bn", eps=1e-20))
        return _affine(h, 5, "head")

    return _mlp(layers)


def small_branch_weight() -> Built:
    """A layer whose output counts 1e-6 times."""

    def layers(x: nn.Variable) -> nn.Variable:
        h = F.relu(_affine(x, 32, "fc1"))
        h = F.relu(_affine(h, 32, "fc2"))
        return _affine(_affine(h, 32, "quiet", factor=1e-6), 5, "head")

    return _mlp(layers)


def exploding_layer() -> Built:
    """A layer whose weights are a thousand times too large."""

    def layers(x: nn.Variable) -> nn.Variable:
        h = F.relu(_affine(x, 32, "fc1"))
        h = F.tanh(_affine(h, 32, "loud", factor=1e3) * 1e-3)
        return _affine(h, 5, "head")

    return _mlp(layers)


def dead_relu() -> Built:
    """Biases of -100 before a ReLU."""

    def layers(x: nn.Variable) -> nn.Variable:
        h = F.relu(_affine(x, 32, "fc1"))
        h = F.relu(_affine(h, 32, "dead", bias=-100.0))
        return _affine(h, 5, "head")

    return _mlp(layers)


def tiny_loss_weight() -> Built:
    loss, feed = _mlp(lambda x: _affine(F.relu(_affine(x, 32, "fc1")), 5, "head"))
    return loss * 1e-7, feed


def attention_overflow() -> Built:
    """Scores that are divided after the product, of queries and keys that are too large for that."""
    x, t = nn.Variable((4, 8, 16)), nn.Variable((4, 8, 1))
    q, k, v = (
        F.reshape(_affine(F.reshape(x, (32, 16)), 64, f"attn/{name}", factor=factor), (4, 8, 64))
        for name, factor in (("q", 50.0), ("k", 50.0), ("v", 1.0))
    )
    scores = F.batch_matmul(q, k, transpose_b=True) * (1.0 / 64.0)
    h = F.batch_matmul(F.softmax(scores * 1e-2), v)
    y = _affine(F.reshape(h, (32, 64)), 5, "head")
    return F.mean(F.softmax_cross_entropy(y, F.reshape(t, (32, 1)))), _data(x, t, 5)


def nan_in_a_weight() -> Built:
    built = _mlp(lambda x: _affine(F.relu(_affine(F.relu(_affine(x, 32, "fc1")), 32, "fc2")), 5, "head"))
    nn.get_parameters()["fc2/affine/W"].d[3, 4] = np.nan
    return built


def nan_in_data() -> Built:
    x, t = nn.Variable((32, 16)), nn.Variable((32, 1))
    y = _affine(F.relu(_affine(x, 32, "fc1")), 5, "head")
    feed = _data(x, t, 5)

    def feed_with_nan() -> None:
        feed()
        x.d[1, 2] = np.nan

    return F.mean(F.softmax_cross_entropy(y, t)), feed_with_nan


def activations_beyond_fp16() -> Built:
    """Activations of 1e5, which a normalisation brings back."""

    def layers(x: nn.Variable) -> nn.Variable:
        h = F.relu(_affine(x, 32, "fc1"))
        h = _affine(h, 32, "huge", factor=3e4)
        return _affine(F.tanh(PF.batch_normalization(h, name="bn")), 5, "head")

    return _mlp(layers)


def branches_apart() -> Built:
    """Two heads on one trunk; what one of them adds to the loss counts 2**-34 times as much."""
    x, t, u = nn.Variable((32, 16)), nn.Variable((32, 1)), nn.Variable((32, 1))
    h = F.relu(_affine(x, 32, "trunk"))
    first = F.mean(F.softmax_cross_entropy(_affine(h, 5, "loud_head"), t))
    quiet = F.relu(_affine(h, 32, "quiet_fc"))
    second = F.mean(F.softmax_cross_entropy(_affine(quiet, 5, "quiet_head"), u))
    feed = _data(x, t, 5)

    def feed_both() -> None:
        feed()
        u.d = (t.d + 1) % 5

    return first * 2.0**10 + second * 2.0**-24, feed_both


def vanishing_sigmoid() -> Built:
    """Sixteen sigmoid layers, each of which shrinks gradients some ten times."""

    def layers(x: nn.Variable) -> nn.Variable:
        for index in range(16):
            x = F.sigmoid(_affine(x, 32, f"fc{index}", factor=0.5))
        return _affine(x, 5, "head")

    return _mlp(layers, 32)


def log_of_zero() -> Built:
    """A logarithm of what a ReLU lets through."""
    x, t = nn.Variable((32, 16)), nn.Variable((32, 5))
    y = F.relu(_affine(F.relu(_affine(x, 32, "fc1")), 5, "head"))
    rng = np.random.default_rng(0)

    def feed() -> None:
        x.d, t.d = rng.standard_normal(x.shape), np.eye(5)[rng.integers(0, 5, 32)]

    return -F.mean(t * F.log(y)), feed


PLANTED: Dict[str, Planted] = {
    "scaled layer": Planted(scaled_layer, "small/affine", "shrinking", "take the factor out", Way.NONE),
    "quiet layer": Planted(small_branch_weight, "quiet/affine", "shrinking", "larger weights", Way.ONE),
    "exploding layer": Planted(exploding_layer, "loud/affine", "exploding", "smaller weights", Way.NONE),
    "dead ReLU": Planted(dead_relu, "dead/affine", "dead_relu", "leaky_relu", None),
    "tiny loss weight": Planted(tiny_loss_weight, "head/affine", "small_loss", "be measured", Way.ONE),
    "attention overflow": Planted(
        attention_overflow, "attn/q/affine/BatchMatmul", "attention_overflow", "queries", None
    ),
    "NaN in a weight": Planted(
        nan_in_a_weight, "fc2/affine", "weight_not_finite", "restore earlier weights", None
    ),
    "NaN in data": Planted(nan_in_data, "fc1/affine", "data_not_finite", "clean the data", None),
    "huge activations": Planted(
        activations_beyond_fp16, "huge/affine", "activation_overflow", "normalise", None
    ),
    "branches apart": Planted(branches_apart, "quiet_head/affine", "small_loss", "be measured", Way.ADAPTIVE),
    "vanishing": Planted(vanishing_sigmoid, "fc0/affine", "spread", "residual connections", Way.ADAPTIVE),
    "log of zero": Planted(log_of_zero, "head/affine", "forward_not_finite", "away from 0", None),
}


def _digits(build: Callable[[nn.Variable], nn.Variable]) -> Built:
    images = load_digits()
    x, t = nn.Variable((32, 1, 8, 8)), nn.Variable((32, 1))
    loss = F.mean(F.softmax_cross_entropy(build(x), t))
    rng = np.random.default_rng(0)

    def feed() -> None:
        chosen = rng.integers(0, len(images.images), 32)
        x.d, t.d = images.images[chosen, None] / 8.0 - 1.0, images.target[chosen, None]

    return loss, feed


def lenet() -> Built:
    def build(x: nn.Variable) -> nn.Variable:
        h = F.relu(F.max_pooling(PF.convolution(x, 8, (3, 3), pad=(1, 1), name="conv1", rng=_rng()), (2, 2)))
        h = F.relu(F.max_pooling(PF.convolution(h, 16, (3, 3), pad=(1, 1), name="conv2", rng=_rng()), (2, 2)))
        return _affine(F.relu(_affine(h, 64, "fc1")), 10, "fc2")

    return _digits(build)


def small_mlp() -> Built:
    return _digits(lambda x: _affine(F.tanh(_affine(F.tanh(_affine(x, 64, "fc1")), 64, "fc2")), 10, "fc3"))


def small_resnet() -> Built:
    def convolution(x: nn.Variable, name: str) -> nn.Variable:
        h = PF.convolution(x, 8, (3, 3), pad=(1, 1), name=name, rng=_rng(), with_bias=False)
        return PF.batch_normalization(h, name=f"{name}_bn")

    def build(x: nn.Variable) -> nn.Variable:
        h = F.relu(convolution(x, "stem"))
        for block in ("block1", "block2"):
            inner = F.relu(convolution(h, f"{block}/conv1"))
            h = F.relu(h + convolution(inner, f"{block}/conv2"))
        return _affine(F.average_pooling(h, (8, 8)), 10, "head")

    return _digits(build)


SOUND: Dict[str, Callable[[], Built]] = {"LeNet": lenet, "MLP": small_mlp, "ResNet": small_resnet}
