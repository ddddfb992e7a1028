# SPDX-License-Identifier: Apache-2.0
"""Networks of the comparison."""

from __future__ import annotations

from typing import Callable, NamedTuple

import nnabla as nn
import nnabla.functions as F
import nnabla.initializer as I
import nnabla.parametric_functions as PF
import numpy as np


class Network(NamedTuple):
    """Network and its training settings.

    Attributes:
        title: its description.
        build: makes the logits, shape (batch, 10), from images of shape (batch, 1, 8, 8).
        learning_rate: of SGD with momentum 0.9 and a loss weight of 1.
        batch_size: images per batch.
    """

    title: str
    build: Callable[[nn.Variable], nn.Variable]
    learning_rate: float
    batch_size: int


def lenet(x: nn.Variable) -> nn.Variable:
    """Two convolutions with pooling, then three affine layers, on images enlarged to 16x16."""
    h = F.interpolate(x, output_size=(16, 16), mode="nearest")
    h = F.relu(F.max_pooling(PF.convolution(h, 8, (5, 5), pad=(2, 2), name="conv1"), (2, 2)))
    h = F.relu(F.max_pooling(PF.convolution(h, 16, (5, 5), name="conv2"), (2, 2)))
    h = F.relu(PF.affine(h, 120, name="fc1"))
    h = F.relu(PF.affine(h, 84, name="fc2"))
    return PF.affine(h, 10, name="fc3")


def tanh_mlp(x: nn.Variable) -> nn.Variable:
    """Eight hidden tanh layers of 128.

    Weights start uniform within 1/sqrt(fan-in), a widespread default. It makes gradients shrink by about 0.6
    per layer on their way to the input, which is why this network is here.
    """
    h = F.reshape(x, (x.shape[0], -1))
    for index in range(1, 9):
        limit = 1.0 / np.sqrt(h.shape[1])
        h = F.tanh(PF.affine(h, 128, w_init=I.UniformInitializer((-limit, limit)), name=f"fc{index}"))
    return PF.affine(h, 10, name="fc9")


NETWORKS = {
    "lenet": Network("LeNet-style conv net", lenet, learning_rate=0.05, batch_size=32),
    "mlp": Network("Deep tanh MLP, 8 x 128", tanh_mlp, learning_rate=0.1, batch_size=64),
}
