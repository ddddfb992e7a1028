# SPDX-License-Identifier: Apache-2.0
"""Networks that tell digits: convolutional, deep and narrow, residual, recurrent."""

from __future__ import annotations

from functools import partial
from typing import Callable

import networks
import nnabla as nn
import nnabla.functions as F
import nnabla.initializer as I
import nnabla.parametric_functions as PF
import numpy as np
from cifar_resnet import resnet
from common.digits import BatchFeeder, load

from .task import Player, Task

Logits = Callable[..., nn.Variable]


def classifier(logits: Logits, batch_size: int, seed: int) -> Task:
    """A training that is scored by the accuracy on images that it has not seen."""
    train, test = load()
    x = nn.Variable((batch_size, *train.x.shape[1:]))
    t = nn.Variable((batch_size, 1))
    loss = F.mean(F.softmax_cross_entropy(logits(x, training=True), t))
    parameters = nn.get_parameters()
    told = logits(nn.Variable.from_numpy_array(test.x), training=False)

    def score() -> float:
        told.forward(clear_buffer=True)
        return float((told.d.argmax(axis=1) == test.t[:, 0]).mean())

    return Task([Player(loss, parameters, BatchFeeder(train, x, t, seed))], score)


def lenet(x: nn.Variable, *, training: bool) -> nn.Variable:
    """That of the samples."""
    return networks.lenet(x)


def _uniform(fan_in: int, gain: float) -> I.UniformInitializer:
    limit = gain * float(np.sqrt(3.0 / fan_in))
    return I.UniformInitializer((-limit, limit))


def mlp(layers: int, width: int, gain: float, x: nn.Variable, *, training: bool) -> nn.Variable:
    """Many tanh layers; with a gain below 1 gradients shrink from each to the next."""
    h = F.reshape(x, (x.shape[0], -1))
    for index in range(1, layers + 1):
        h = F.tanh(PF.affine(h, width, w_init=_uniform(h.shape[1], gain), name=f"fc{index}"))
    return PF.affine(h, 10, name="out")


def conv12(x: nn.Variable, *, training: bool) -> nn.Variable:
    """Twelve plain convolutions, nothing normalized."""
    h = x
    for index in range(1, 13):
        maps = 16 if index < 4 else 24
        w_init = I.NormalInitializer(float(np.sqrt(2.0 / (9 * h.shape[1]))))
        h = F.relu(PF.convolution(h, maps, (3, 3), pad=(1, 1), w_init=w_init, name=f"conv{index}"))
        if index in (3, 6):
            h = F.max_pooling(h, (2, 2))
    return PF.affine(h, 10, name="fc")


def resnet20(x: nn.Variable, *, training: bool) -> nn.Variable:
    """ResNet-20 with half as many maps."""
    return resnet(x, 3, (8, 16, 32), training, decay_rate=0.8)


def rnn(steps: int, width: int, x: nn.Variable, *, training: bool) -> nn.Variable:
    """A recurrent tanh layer that reads an image pixel by pixel, each time with the seven that follow."""
    pixels = F.reshape(x, (x.shape[0], -1))
    pixels = F.pad(pixels, (0, 7))
    identity = np.eye(width, dtype=np.float32)
    h = F.constant(0.0, (x.shape[0], width))
    for step in range(steps):
        seen = pixels[:, step : step + 8]
        h = F.tanh(
            PF.affine(seen, width, name="in")
            + PF.affine(h, width, w_init=identity, with_bias=False, name="state")
        )
    return PF.affine(h, 10, name="out")


BUILDERS = {
    "lenet": partial(classifier, lenet, 32),
    "mlp8": partial(classifier, partial(mlp, 8, 128, 0.58), 64),
    "mlp24": partial(classifier, partial(mlp, 24, 64, 1.0), 64),
    "conv12": partial(classifier, conv12, 32),
    "resnet20": partial(classifier, resnet20, 32),
    "rnn64": partial(classifier, partial(rnn, 64, 48), 32),
}
