# SPDX-License-Identifier: Apache-2.0
"""Classifiers of digits: convolutional, deep and narrow, residual, recurrent."""

from __future__ import annotations

from functools import partial
from typing import Callable

import networks
import nnabla as nn
import nnabla.functions as F
import nnabla.initializer as I
import nnabla.parametric_functions as PF
import numpy as np
from common.digits import BatchFeeder, load
from common.resnet import cifar_resnet

from .task import Player, Task, accuracy, cross_entropy

Logits = Callable[..., nn.Variable]


def classifier(logits: Logits, batch_size: int, seed: int) -> Task:
    """Make a training that is scored by the accuracy on test images."""
    train = load().train
    x, t = nn.Variable((batch_size, *train.x.shape[1:])), nn.Variable((batch_size, 1))
    loss = cross_entropy(logits(x, training=True), t)
    parameters = nn.get_parameters()
    return Task(
        [Player(loss, parameters, BatchFeeder(train, x, t, seed))], accuracy(partial(logits, training=False))
    )


def lenet(x: nn.Variable, *, training: bool) -> nn.Variable:
    """LeNet of the samples."""
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


def sigmoids(layers: int, x: nn.Variable, *, training: bool) -> nn.Variable:
    """Plain sigmoid layers, each of which makes gradients several times smaller."""
    h = F.reshape(x, (x.shape[0], -1))
    for index in range(layers):
        deviation = float(np.sqrt(2.0 / h.shape[1]))
        h = F.sigmoid(PF.affine(h, 64, w_init=I.NormalInitializer(deviation), name=f"fc{index}"))
        h = 2.0 * h - 1.0
    return PF.affine(h, 10, name="out")


def conv12(x: nn.Variable, *, training: bool) -> nn.Variable:
    """Twelve plain convolutions without normalization."""
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
    return cifar_resnet(x, 3, (8, 16, 32), training, decay_rate=0.8)


def rnn(steps: int, width: int, x: nn.Variable, *, training: bool) -> nn.Variable:
    """Recurrent tanh layer that reads an image pixel by pixel, each with the next seven."""
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
