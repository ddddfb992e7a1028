# SPDX-License-Identifier: Apache-2.0
"""What the networks of these tests are made of, and what is said of those that something is wrong with."""

from __future__ import annotations

import random
from typing import Any, Callable, NamedTuple, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.initializer as I
import nnabla.parametric_functions as PF
import numpy as np

from tests.worlds.tampering import Gate

Built = Tuple[Any, Any]
"""A loss, or an updater, and a feeder or None."""


class Trouble(NamedTuple):
    """A network that something is wrong with."""

    kind: str
    function: str  # the name that is to be told first
    told: str  # words of the cause
    build: Callable[[bool], Built]  # with True it is mended
    fatal: bool
    remedy: str  # one of nnabla_adaloss.diagnosis.remedies, if that is to be checked
    others: Tuple[str, ...]  # the functions of other causes
    parameters: Tuple[str, ...]  # all that are at fault or get no gradient, if that is to be checked


def trouble(
    kind: str,
    function: str,
    told: str = "",
    *,
    fatal: bool = True,
    remedy: str = "",
    others: Tuple[str, ...] = (),
    parameters: Tuple[str, ...] = (),
) -> Callable[[Callable[[bool], Built]], Trouble]:
    return lambda build: Trouble(kind, function, told, build, fatal, remedy, others, parameters)


def affine(x: nn.Variable, size: int, name: str, factor: float = 1.0, bias: float = 0.0) -> nn.Variable:
    """Weights of a standard deviation of `factor` over the root of the fan-in."""
    std = factor / np.sqrt(np.prod(x.shape[1:]))
    rng = np.random.RandomState(sum(map(ord, name)))
    weights = I.NormalInitializer(std, rng=rng)
    return PF.affine(x, size, name=name, w_init=weights, b_init=I.ConstantInitializer(bias))


def inputs() -> Tuple[nn.Variable, nn.Variable]:
    return nn.Variable((32, 16)), nn.Variable((32, 1))


def feeder(x: nn.Variable, t: nn.Variable, spoil: Callable[[], None] = lambda: None) -> Callable[[], None]:
    rng = np.random.default_rng(0)

    def feed() -> None:
        x.d, t.d = rng.standard_normal(x.shape), rng.integers(0, 5, t.shape)
        spoil()

    return feed


def cross_entropy(y: nn.Variable, t: nn.Variable) -> nn.Variable:
    return F.mean(F.softmax_cross_entropy(y, t))


def classes(h: nn.Variable, t: nn.Variable) -> nn.Variable:
    return cross_entropy(affine(h, 5, "head"), t)


def hidden(x: nn.Variable) -> nn.Variable:
    return F.tanh(affine(x, 16, "fc1"))


def network(
    layers: Callable[[nn.Variable], nn.Variable] = hidden,
    loss: Callable[[nn.Variable, nn.Variable], nn.Variable] = classes,
    spoil: Callable[[nn.Variable, nn.Variable], object] = lambda x, t: None,
    shape: Tuple[int, ...] = (32, 16),
) -> Built:
    """The loss of layers and labels, and a feeder that ends with `spoil`."""
    x, t = nn.Variable(shape), nn.Variable((shape[0], 1))
    return loss(layers(x), t), feeder(x, t, lambda: spoil(x, t))


def noisy_net() -> Built:
    """Everything that passes could leave a trace in."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    x, t = nn.Variable((8, 6)), nn.Variable((8, 1))
    h = PF.batch_normalization(affine(x, 6, "fc1"), name="bn")
    h = F.dropout(F.relu(h) + F.randn(shape=h.shape) * 0.1, 0.5)

    def feed() -> None:
        x.d, t.d = np.random.randn(*x.shape), np.random.randint(0, 3, t.shape)  # noqa: NPY002
        x.d += random.random()

    return cross_entropy(affine(h, 3, "fc2"), t), feed


# Losses that lose gradients without scaling.


def quiet_before_a_loud_tail() -> Built:
    """Gradients of single numbers, which stay fp32, are far larger than those of the layers."""
    return network(loss=lambda h, t: F.log(classes(h, t) * 1e-15 + 1e-3) * 100.0)


def tiny_loss_weight() -> Built:
    loss, feed = network()
    return loss * 1e-12, feed


def branches_apart() -> Built:
    """Two heads on one trunk; what one of them adds to the loss counts 2**-34 times as much."""
    (x, t), u = inputs(), nn.Variable((32, 1))
    h = F.relu(affine(x, 32, "trunk"))
    loud = cross_entropy(affine(h, 5, "loud_head"), t)
    quiet = cross_entropy(affine(F.relu(affine(h, 32, "quiet_fc")), 5, "quiet_head"), u)

    def other_labels() -> None:
        u.d = (t.d + 1) % 5

    return loud * 2.0**10 + quiet * 2.0**-24, feeder(x, t, other_labels)


def vanishing_sigmoid() -> Built:
    """Sixteen sigmoid layers, each of which shrinks gradients some ten times."""

    def layers(x: nn.Variable) -> nn.Variable:
        for index in range(16):
            x = F.sigmoid(affine(x, 32, f"fc{index}", 0.7))
        return x

    return network(layers)


def recurrence_with_a_quiet_beginning() -> Built:
    """All uses of a weight are one layer: only the first state's gradient is lost."""
    s = nn.parameter.get_parameter_or_create("state", (1, 16), I.NormalInitializer(1.0))

    def layers(x: nn.Variable) -> nn.Variable:
        h = F.broadcast(s, (32, 16)) * 1.0
        for _ in range(12):
            h = h * 0.15 + F.tanh(affine(h, 16, "rnn", 0.01) + affine(x, 16, "in"))
        return h

    return network(layers)


def overflowing_biases() -> Built:
    """A sum over all pixels: biases' gradients overflow, and nothing else does."""
    x, t = nn.Variable((8, 1, 32, 32)), nn.Variable((8, 1, 32, 32))
    h = F.tanh(PF.convolution(x, 4, (3, 3), pad=(1, 1), name="a", rng=np.random.RandomState(0)))
    y = PF.convolution(h, 1, (3, 3), pad=(1, 1), name="b", rng=np.random.RandomState(1))
    fill = feeder(x, t)

    def feed() -> None:
        fill()
        t.d = 0.5 * x.d + 9.0

    return F.sum(F.squared_error(y, t)), feed


def two_heads() -> Built:
    """Both lose everything at once."""
    x, t = nn.Variable((8, 3, 8, 8)), nn.Variable((8, 1))
    h = F.relu(PF.convolution(x, 8, (3, 3), name="trunk", rng=np.random.RandomState(0)))
    return (cross_entropy(affine(h, 5, "a"), t) + cross_entropy(affine(h, 5, "b"), t)) * 1e-12, feeder(x, t)


def shrunk(x: nn.Variable, factor: float) -> nn.Variable:
    gate = Gate()
    gate.factor = factor
    return gate(x)


def branches_that_shrink() -> Built:
    """In each of two branches, and in none of its layers, the gradient becomes small at once."""

    def layers(x: nn.Variable) -> nn.Variable:
        h = F.tanh(affine(x, 16, "trunk"))
        return sum(affine(shrunk(F.tanh(affine(h, 16, n + "1")), 1e-12), 16, n + "2") for n in "ab")

    return network(layers)


def recurrence_that_explodes() -> Built:
    """The gradient grows from step to step, and what forward computes does not."""

    def layers(x: nn.Variable) -> nn.Variable:
        for _ in range(12):
            x = shrunk(F.tanh(affine(x, 16, "rnn")), 16.0)
        return x

    return network(layers)


def small_residual() -> Built:
    def layers(x: nn.Variable) -> nn.Variable:
        h = F.tanh(affine(x, 16, "stem"))
        return h + affine(F.tanh(affine(h, 16, "inner")), 16, "out") * 1e-7

    return network(layers)


def loud_loss() -> Built:
    loss, feed = network()
    return loss * 1e4, feed


def sum_of_losses() -> Built:
    loss, feed = network()
    return F.sum(loss.parent.inputs[0]) * 1e5, feed


def coarse_format() -> Built:
    """Gradients of E5M2 that are wrong by more than half at any scale, and lost without."""

    def layers(x: nn.Variable) -> nn.Variable:
        for index in range(20):
            x = F.tanh(PF.batch_normalization(affine(x, 16, f"fc{index}"), name=f"bn{index}"))
        return x

    loss, feed = network(layers)
    return loss * 1e-7, feed
