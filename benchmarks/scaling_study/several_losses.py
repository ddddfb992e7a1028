# SPDX-License-Identifier: Apache-2.0
"""Trainings whose loss is a sum of terms of different sizes."""

from __future__ import annotations

from typing import Callable, Dict, NamedTuple, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
from common.digits import BatchFeeder, Data, enlarged, load
from numpy.typing import NDArray

from .task import Player, Task, accuracy, cross_entropy

BATCH = 64
_WIDTH = 64

Variables = Tuple[nn.Variable, nn.Variable]
Pair = Callable[[nn.Variable], Variables]


def _dense(h: nn.Variable, width: int, name: str) -> nn.Variable:
    return F.tanh(PF.affine(h, width, name=name))


def trunk(x: nn.Variable, name: str = "trunk") -> nn.Variable:
    """Apply three dense layers."""
    h = F.reshape(x, (x.shape[0], -1))
    for index in range(3):
        h = _dense(h, _WIDTH, f"{name}{index}")
    return h


def head(h: nn.Variable, classes: int, name: str) -> nn.Variable:
    """Compute the logits of a classifier with one hidden layer."""
    return PF.affine(_dense(h, _WIDTH // 2, f"{name}/hidden"), classes, name=f"{name}/out")


def _heads(x: nn.Variable) -> Variables:
    """Two heads on one trunk."""
    h = trunk(x)
    return head(h, 2, "large"), head(h, 10, "small")


def _towers(x: nn.Variable) -> Variables:
    """Two networks that share only their input."""
    return head(trunk(x, "large"), 2, "large"), head(trunk(x, "small"), 10, "small")


def lenet_pair(x: nn.Variable) -> Variables:
    """Two heads on the convolutions of LeNet-5, with the usual 16 and 32 maps."""
    h = F.relu(F.max_pooling(PF.convolution(x, 16, (5, 5), name="conv1"), (2, 2)))
    h = F.relu(F.max_pooling(PF.convolution(h, 32, (5, 5), name="conv2"), (2, 2)))
    h = F.relu(PF.affine(h, 120, name="fc"))
    return _relu_head(h, 2, "large"), _relu_head(h, 10, "small")


def _relu_head(h: nn.Variable, classes: int, name: str) -> nn.Variable:
    return PF.affine(F.relu(PF.affine(h, 84, name=f"{name}/hidden")), classes, name=f"{name}/out")


PAIRS: Dict[str, Pair] = {"heads": _heads, "towers": _towers}


class Terms(NamedTuple):
    """Losses of two tasks on the same batches."""

    large: nn.Variable
    small: nn.Variable
    feed: Callable[[], None]
    score: Callable[[], float]


def terms(pair: Pair, data: Data, seed: int) -> Terms:
    """Make two losses of a network."""
    train, test = data
    x = nn.Variable((BATCH, *train.x.shape[1:]))
    digit, odd = nn.Variable((BATCH, 1)), nn.Variable((BATCH, 1))
    large, small = pair(x)
    batches = BatchFeeder(train, x, digit, seed)

    def feed() -> None:
        batches()
        odd.d = digit.d % 2

    score = accuracy(lambda x: pair(x)[1], test)
    return Terms(cross_entropy(large, odd), cross_entropy(small, digit), feed, score)


def two_losses(net: str, weight: float, seed: int) -> Task:
    """Train odd or even, and `weight` times the digit; scored by the latter's accuracy."""
    large, small, feed, score = terms(PAIRS[net], load(), seed)
    return Task([Player(large + small * weight, nn.get_parameters(), feed)], score)


def lenet_heads(weight: float, seed: int) -> Task:
    """Train the same on a LeNet of the usual size, on images of 32 x 32 pixels."""
    large, small, feed, score = terms(lenet_pair, enlarged(32), seed)
    return Task([Player(large + small * weight, nn.get_parameters(), feed)], score)


def annealed(start: float, end: float, iterations: int, seed: int) -> Task:
    """Train two heads; the weight of the scored one is 0 for the first tenth, then rises from `start`."""
    large, small, feed, score = terms(PAIRS["heads"], load(), seed)
    weight, count = nn.Variable.from_numpy_array(np.zeros((), np.float32)), 0

    def rise() -> None:
        nonlocal count
        done = (count / iterations - 0.1) / 0.9
        weight.d = start * (end / start) ** min(done, 1.0) if done >= 0.0 else 0.0
        count += 1
        feed()

    return Task([Player(large + small * weight, nn.get_parameters(), rise)], score)


def auxiliary(weight: float, seed: int) -> Task:
    """Train a conv net on digits, and its middle on their ink, with that loss times `weight`.

    Scored by the share of the pixels' ink that the auxiliary head explains: 1 less its squared error, divided
    by the variance.
    """
    train, test = load()
    x, t, ink = (nn.Variable((BATCH, *shape)) for shape in ((1, 8, 8), (1,), (1, 4, 4)))

    def net(x: nn.Variable) -> Variables:
        h = F.relu(PF.convolution(x, 16, (3, 3), pad=(1, 1), name="conv1"))
        h = F.relu(PF.convolution(F.max_pooling(h, (2, 2)), 24, (3, 3), pad=(1, 1), name="conv2"))
        side = F.relu(PF.convolution(h, 16, (3, 3), pad=(1, 1), name="ink/conv"))
        h = F.relu(PF.convolution(F.max_pooling(h, (2, 2)), 32, (2, 2), name="conv3"))
        return PF.affine(h, 10, name="digits"), PF.convolution(side, 1, (1, 1), name="ink/out")

    def inked(x: NDArray[np.float32]) -> NDArray[np.float32]:
        squares = x.reshape(len(x), 1, 4, 2, 4, 2)
        return squares.mean(axis=(3, 5))  # type: ignore[no-any-return]

    digits, where = net(x)
    loss = cross_entropy(digits, t) + F.mean(F.squared_error(where, ink)) * weight
    parameters, batches = nn.get_parameters(), BatchFeeder(train, x, t, seed)
    _, told = net(nn.Variable.from_numpy_array(test.x))
    wanted = inked(test.x)

    def feed() -> None:
        batches()
        ink.d = inked(x.d)

    def score() -> float:
        told.forward(clear_buffer=True)
        return 1.0 - float(((told.d - wanted) ** 2).mean() / wanted.var())

    return Task([Player(loss, parameters, feed)], score)


def vae(weight: float, seed: int) -> Task:
    """Train a variational autoencoder: mean error of a pixel, and the KL divergence times `weight`.

    Scored by minus the logarithms of the squared error and of one plus the KL divergence, so that a loss of
    either shows.
    """
    train, test = load()
    x, t, noise = nn.Variable((BATCH, 1, 8, 8)), nn.Variable((BATCH, 1)), nn.Variable((BATCH, 8))

    def net(x: nn.Variable, noise: nn.Variable) -> Variables:
        h = _dense(F.reshape(x, (x.shape[0], -1)), _WIDTH, "encoder")
        mean, logvar = PF.affine(h, 8, name="mean"), PF.affine(h, 8, name="logvar")
        z = mean + F.exp(0.5 * logvar) * noise
        made = PF.affine(_dense(z, _WIDTH, "decoder"), 64, name="pixels")
        error = F.mean(F.squared_error(made, F.reshape(x, made.shape)))
        return error, 0.5 * F.mean(F.sum(mean**2 + F.exp(logvar) - logvar - 1.0, axis=1))

    error, kl = net(x, noise)
    loss = error + kl * weight
    parameters, batches = nn.get_parameters(), BatchFeeder(train, x, t, seed)
    random = np.random.RandomState(seed)
    test_noise = np.random.RandomState(0).randn(len(test.x), 8)
    told = net(nn.Variable.from_numpy_array(test.x), nn.Variable.from_numpy_array(test_noise))

    def feed() -> None:
        batches()
        noise.d = random.randn(BATCH, 8)

    def score() -> float:
        values = []
        for value in told:
            value.forward(clear_buffer=True)
            values.append(float(value.d))
        return -float(np.log10(values[0]) + np.log10(1.0 + values[1]))

    return Task([Player(loss, parameters, feed)], score)
