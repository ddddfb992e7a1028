# SPDX-License-Identifier: Apache-2.0
"""Networks that tell digits: convolutional, deep and narrow, residual, recurrent."""

from __future__ import annotations

from functools import partial
from typing import Callable

import nnabla as nn
import nnabla.functions as F
import nnabla.initializer as I
import nnabla.parametric_functions as PF
import numpy as np
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
    """Two convolutions with pooling, then three affine layers, on images enlarged to 16x16."""
    h = F.interpolate(x, output_size=(16, 16), mode="nearest")
    h = F.relu(F.max_pooling(PF.convolution(h, 8, (5, 5), pad=(2, 2), name="conv1"), (2, 2)))
    h = F.relu(F.max_pooling(PF.convolution(h, 16, (5, 5), name="conv2"), (2, 2)))
    h = F.relu(PF.affine(h, 120, name="fc1"))
    h = F.relu(PF.affine(h, 84, name="fc2"))
    return PF.affine(h, 10, name="fc3")


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
    """He et al. 2016, section 4.2, with n = 3, zero-padded shortcuts, and 8 to 32 maps."""

    def unit(h: nn.Variable, maps: int, stride: int = 1) -> nn.Variable:
        h = PF.convolution(h, maps, (3, 3), pad=(1, 1), stride=(stride, stride), with_bias=False)
        return PF.batch_normalization(h, batch_stat=training, decay_rate=0.8)

    with nn.parameter_scope("stem"):
        h = F.relu(unit(x, 8))
    for stage, maps in enumerate((8, 16, 32)):
        for block in range(3):
            stride = 2 if stage > 0 and block == 0 else 1
            shortcut = h
            if stride == 2:
                shortcut = F.pad(h[:, :, ::2, ::2], (0, maps // 2, 0, 0, 0, 0))
            with nn.parameter_scope(f"stage{stage}/block{block}/a"):
                h = F.relu(unit(h, maps, stride))
            with nn.parameter_scope(f"stage{stage}/block{block}/b"):
                h = F.relu(unit(h, maps) + shortcut)
    return PF.affine(F.global_average_pooling(h), 10, name="fc")


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
