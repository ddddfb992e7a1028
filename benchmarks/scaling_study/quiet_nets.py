# SPDX-License-Identifier: Apache-2.0
"""Networks whose gradients change slowly: digits until all are known, and a graph of digits."""

from __future__ import annotations

from functools import partial
from typing import Callable

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
from common.digits import BatchFeeder, load
from numpy.typing import NDArray

from .task import Player, Task, accuracy, cross_entropy

_BATCH = 32
_NODES = 64
_NEIGHBOURS = 4


def _focal(logits: nn.Variable, t: nn.Variable) -> nn.Variable:
    """The focal loss (Lin et al. 2017) with gamma 2: what is told already counts still less."""
    entropy = F.softmax_cross_entropy(logits, t)
    return F.mean((1.0 - F.exp(-entropy)) ** 2 * entropy)


def _dense(h: nn.Variable) -> nn.Variable:
    h = F.reshape(h, (h.shape[0], -1))
    return PF.affine(F.relu(PF.affine(h, 32, name="hidden")), 10, name="out")


def _digits(loss: Callable[[nn.Variable, nn.Variable], nn.Variable], seed: int) -> Task:
    """An MLP that tells digits, for so long that it knows all that it is trained on."""
    train = load().train
    x, t = nn.Variable((_BATCH, 1, 8, 8)), nn.Variable((_BATCH, 1))
    score = accuracy(_dense)
    player = Player(loss(_dense(x), t), nn.get_parameters(), BatchFeeder(train, x, t, seed))
    return Task([player], score)


digits = partial(_digits, cross_entropy)
focal_digits = partial(_digits, _focal)


def _adjacency(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """The normalized adjacency of images and those that are most like them (Kipf and Welling 2017)."""
    flat = x.reshape(len(x), -1)
    distances = ((flat[:, np.newaxis] - flat) ** 2).sum(axis=2)
    near = np.argsort(distances, axis=1, kind="stable")[:, : _NEIGHBOURS + 1]
    linked = np.zeros((len(x), len(x)), np.float32)
    np.put_along_axis(linked, near, 1.0, axis=1)
    linked = np.maximum(linked, linked.T)
    degrees = linked.sum(axis=1) ** -0.5
    return degrees[:, np.newaxis] * linked * degrees


def _graph_logits(images: nn.Variable) -> nn.Variable:
    adjacency = nn.Variable.from_numpy_array(_adjacency(images.d)[np.newaxis])

    def spread(h: nn.Variable) -> nn.Variable:
        return F.reshape(F.batch_matmul(adjacency, F.reshape(h, (1, *h.shape))), h.shape)

    h = nn.Variable.from_numpy_array(images.d.reshape(len(images.d), -1))
    for layer in ("graph1", "graph2"):
        h = F.relu(spread(PF.affine(h, 24, name=layer)))
    return spread(PF.affine(h, 10, name="out"))


def graph_network(seed: int) -> Task:
    """Three graph convolutions that tell digits from those that look alike, of one graph for good."""
    train = load().train
    chosen = np.random.RandomState(seed).permutation(len(train.x))[:_NODES]
    logits = _graph_logits(nn.Variable.from_numpy_array(train.x[chosen]))
    loss = cross_entropy(logits, nn.Variable.from_numpy_array(train.t[chosen]))
    return Task([Player(loss, nn.get_parameters(), lambda: None)], accuracy(_graph_logits))
