# SPDX-License-Identifier: Apache-2.0
"""Trainings with one loss whose layers have gradients of very different sizes."""

from __future__ import annotations

import nnabla as nn
import nnabla.functions as F
import nnabla.initializer as I
import nnabla.parametric_functions as PF
import numpy as np
from common.digits import BatchFeeder, load
from common.discrepancy import discrepancy
from gan import NOISE, critic, generator, loss_against
from numpy.typing import NDArray

from .task import Player, Task

_BATCH = 64
_PIXEL_VALUES = 17
_DRAWN = 720


def _scored_by_accuracy(logits: nn.Variable, test_labels: NDArray[np.int64]) -> float:
    logits.forward(clear_buffer=True)
    return float((logits.d.argmax(axis=1) == test_labels[:, 0]).mean())


def sigmoids(layers: int, seed: int) -> Task:
    """Plain sigmoid layers: each makes gradients several times smaller. Scored by the accuracy."""
    train, test = load()

    def logits(x: nn.Variable) -> nn.Variable:
        h = F.reshape(x, (x.shape[0], -1))
        for index in range(layers):
            deviation = float(np.sqrt(2.0 / h.shape[1]))
            h = F.sigmoid(PF.affine(h, 64, w_init=I.NormalInitializer(deviation), name=f"fc{index}"))
            h = 2.0 * h - 1.0
        return PF.affine(h, 10, name="out")

    x, t = nn.Variable((_BATCH, 1, 8, 8)), nn.Variable((_BATCH, 1))
    loss = F.mean(F.softmax_cross_entropy(logits(x), t))
    parameters = nn.get_parameters()
    shown = logits(nn.Variable.from_numpy_array(test.x))
    feed = BatchFeeder(train, x, t, seed)
    return Task([Player(loss, parameters, feed)], lambda: _scored_by_accuracy(shown, test.t))


def embeddings(seed: int) -> Task:
    """Digits as bags of 64 words, one for each pixel and its value: an embedding beside dense layers."""
    train, test = load()

    def logits(words: nn.Variable) -> nn.Variable:
        h = F.mean(PF.embed(words, 64 * _PIXEL_VALUES, 32, name="words"), axis=1)
        h = F.tanh(PF.affine(h, 64, name="fc"))
        return PF.affine(h, 10, name="out")

    def words_of(x: NDArray[np.float32]) -> NDArray[np.float32]:
        values = np.rint((x.reshape(len(x), 64) + 1.0) * 8.0)
        return (np.arange(64) * _PIXEL_VALUES + values).astype(np.float32)

    x, t, words = nn.Variable((_BATCH, 1, 8, 8)), nn.Variable((_BATCH, 1)), nn.Variable((_BATCH, 64))
    loss = F.mean(F.softmax_cross_entropy(logits(words), t))
    parameters, batches = nn.get_parameters(), BatchFeeder(train, x, t, seed)
    shown = logits(nn.Variable.from_numpy_array(words_of(test.x)))

    def feed() -> None:
        batches()
        words.d = words_of(x.d)

    return Task([Player(loss, parameters, feed)], lambda: _scored_by_accuracy(shown, test.t))


def gan_of_one_loss(weight: float, seed: int) -> Task:
    """A generator and its critic, trained by one loss: the critic's, and `weight` times the generator's.

    The critic's loss sees drawn images without a way back, and the generator's a critic that is not trained.
    Scored by minus the distance of what is drawn to real digits (see `gan`).
    """
    train, test = load()
    real, noise = nn.Variable((_BATCH, 64)), nn.Variable((_BATCH, NOISE))
    drawn = generator(noise)
    seen = F.identity(drawn)
    seen.need_grad = False
    caught = loss_against(critic(real), 1.0) + loss_against(critic(seen), 0.0)
    parameters = nn.get_parameters()
    frozen = {name: p.get_unlinked_variable(need_grad=False) for name, p in parameters.items()}
    with nn.parameter_scope("", {}):
        for name, parameter in frozen.items():
            if name.startswith("critic"):
                nn.parameter.set_parameter(name, parameter)
        fooled = loss_against(critic(drawn), 1.0)
    random = np.random.RandomState(seed)
    shown = generator(nn.Variable.from_numpy_array(np.random.RandomState(0).randn(_DRAWN, NOISE)))
    wanted = test.x.reshape(-1, 64)

    def feed() -> None:
        real.d = train.x[random.randint(0, len(train.x), _BATCH)].reshape(_BATCH, 64)
        noise.d = random.randn(_BATCH, NOISE)

    def score() -> float:
        shown.forward(clear_buffer=True)
        return -discrepancy(shown.d, wanted)

    return Task([Player(caught + fooled * weight, parameters, feed)], score)
