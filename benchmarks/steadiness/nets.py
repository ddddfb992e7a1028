# SPDX-License-Identifier: Apache-2.0
"""The networks whose training should be quiet: their gradients change slowly."""

from __future__ import annotations

from functools import partial
from typing import Callable, Dict

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
from common.digits import BatchFeeder, load
from numpy.typing import NDArray
from scaling_study.gan import gan
from scaling_study.language import transformer
from scaling_study.several_losses import vae
from scaling_study.task import Net, Player, Task

_ACCURACY = "accuracy on 360 images"
_BATCH = 32
_NODES = 64
_NEIGHBOURS = 4

Loss = Callable[[nn.Variable, nn.Variable], nn.Variable]


def cross_entropy(logits: nn.Variable, t: nn.Variable) -> nn.Variable:
    """The mean cross entropy; its gradients vanish as soon as every digit is told."""
    return F.mean(F.softmax_cross_entropy(logits, t))


def focal(logits: nn.Variable, t: nn.Variable) -> nn.Variable:
    """The focal loss (Lin et al. 2017) with gamma 2: what is told already counts still less."""
    entropy = F.softmax_cross_entropy(logits, t)
    return F.mean((1.0 - F.exp(-entropy)) ** 2 * entropy)


def _dense(h: nn.Variable) -> nn.Variable:
    h = F.reshape(h, (h.shape[0], -1))
    return PF.affine(F.relu(PF.affine(h, 32, name="hidden")), 10, name="out")


def digits(loss: Loss, seed: int) -> Task:
    """An MLP that tells digits, for so long that it knows all that it is trained on."""
    train, test = load()
    x, t = nn.Variable((_BATCH, 1, 8, 8)), nn.Variable((_BATCH, 1))
    told = _dense(nn.Variable.from_numpy_array(test.x))

    def score() -> float:
        told.forward(clear_buffer=True)
        return float((told.d.argmax(axis=1) == test.t[:, 0]).mean())

    player = Player(loss(_dense(x), t), nn.get_parameters(), BatchFeeder(train, x, t, seed))
    return Task([player], score)


def neighbours(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """The normalized adjacency of images and those that are most like them (Kipf and Welling 2017)."""
    flat = x.reshape(len(x), -1)
    distances = ((flat[:, np.newaxis] - flat) ** 2).sum(axis=2)
    near = np.argsort(distances, axis=1, kind="stable")[:, : _NEIGHBOURS + 1]
    linked = np.zeros((len(x), len(x)), np.float32)
    np.put_along_axis(linked, near, 1.0, axis=1)
    linked = np.maximum(linked, linked.T)
    degrees = linked.sum(axis=1) ** -0.5
    return degrees[:, np.newaxis] * linked * degrees


def _graph_network(images: NDArray[np.float32]) -> nn.Variable:
    adjacency = nn.Variable.from_numpy_array(neighbours(images)[np.newaxis])

    def spread(h: nn.Variable) -> nn.Variable:
        return F.reshape(F.batch_matmul(adjacency, F.reshape(h, (1, *h.shape))), h.shape)

    h = nn.Variable.from_numpy_array(images.reshape(len(images), -1))
    for layer in ("graph1", "graph2"):
        h = F.relu(spread(PF.affine(h, 24, name=layer)))
    return spread(PF.affine(h, 10, name="out"))


def graph_network(seed: int) -> Task:
    """Three graph convolutions that tell digits from those that look alike, of one graph for good."""
    train, test = load()
    chosen = np.random.RandomState(seed).permutation(len(train.x))[:_NODES]
    loss = cross_entropy(_graph_network(train.x[chosen]), nn.Variable.from_numpy_array(train.t[chosen]))
    told = _graph_network(test.x)

    def score() -> float:
        told.forward(clear_buffer=True)
        return float((told.d.argmax(axis=1) == test.t[:, 0]).mean())

    return Task([Player(loss, nn.get_parameters(), lambda: None)], score)


_SMALL_TRANSFORMER = partial(transformer, batch=4, length=16, width=16)
_GAN_SOLVER = partial(S.Momentum, momentum=0.5)

NETS: Dict[str, Net] = {
    "classifier": Net(
        "converged classifier", _ACCURACY, partial(digits, cross_entropy), 1e-2, 1500, 0.01, S.Adam
    ),
    "focal": Net("focal loss", _ACCURACY, partial(digits, focal), 1e-2, 1500, 0.01, S.Adam),
    "gcn": Net("graph network", _ACCURACY, graph_network, 1e-2, 1500, 0.01, S.Adam),
    "vae": Net("VAE, KL times 1e-4", "minus log of both", partial(vae, 1e-4), 3e-3, 1500, 0.02, S.Adam),
    "gan": Net("GAN, two losses", "minus MMD to real digits", gan, 0.1, 1500, 0.01, _GAN_SOLVER),
    "transformer": Net(
        "language model", "minus nats per letter", _SMALL_TRANSFORMER, 3e-3, 1500, 0.02, S.Adam
    ),
}
IN_HALF = ("classifier", "focal", "gcn")
"""Those that are small enough for nnabla's half precision on a CPU."""
