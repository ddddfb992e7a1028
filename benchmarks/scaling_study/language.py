# SPDX-License-Identifier: Apache-2.0
"""A small language model: a transformer that tells the next letter."""

from __future__ import annotations

import nnabla as nn
import nnabla.functions as F
import nnabla.initializer as I
import nnabla.parametric_functions as PF
import numpy as np
from common.scenes import Floats
from common.text import text, windows

from .task import Player, Task

_BATCH, _LENGTH, _WIDTH, _HEADS, _BLOCKS = 8, 32, 32, 2, 2
_TEST_WINDOWS = 256
# What is not to be seen: as in many published models, and within the range of float16.
_HIDDEN = -1e4


def transformer(seed: int) -> Task:
    """A training that is scored by minus the mean loss of a letter that it has not seen, in nats."""
    train, test, symbols = text()
    x, t = nn.Variable((_BATCH, _LENGTH)), nn.Variable((_BATCH, _LENGTH, 1))
    loss = F.mean(F.softmax_cross_entropy(_logits(x, symbols), t))
    parameters = nn.get_parameters()
    random = np.random.RandomState(seed)

    def feed() -> None:
        seen, following = windows(train, random.randint(0, len(train) - _LENGTH - 1, _BATCH), _LENGTH)
        x.d, t.d = seen, following[:, :, np.newaxis]

    starts = np.linspace(0, len(test) - _LENGTH - 2, _TEST_WINDOWS).astype(np.int64)
    seen, following = windows(test, starts, _LENGTH)
    told = _logits(nn.Variable.from_numpy_array(seen), symbols)
    following_variable = nn.Variable.from_numpy_array(following[:, :, np.newaxis])
    test_loss = F.mean(F.softmax_cross_entropy(told, following_variable))

    def score() -> float:
        test_loss.forward(clear_buffer=True)
        return -float(test_loss.d)

    return Task([Player(loss, parameters, feed)], score)


def _logits(x: nn.Variable, symbols: int) -> nn.Variable:
    length = x.shape[1]
    places = nn.parameter.get_parameter_or_create("places", (1, length, _WIDTH), I.NormalInitializer(0.1))
    h = PF.embed(x, symbols, _WIDTH, initializer=I.NormalInitializer(0.5), name="letters")
    h = h + F.broadcast(places, h.shape)
    hidden = np.triu(np.full((1, length, length), _HIDDEN, np.float32), 1)
    for block in range(_BLOCKS):
        with nn.parameter_scope(f"block{block}"):
            h = h + _attention(PF.layer_normalization(h, batch_axis=(0, 1), name="before_attention"), hidden)
            g = PF.affine(
                PF.layer_normalization(h, batch_axis=(0, 1), name="before_mlp"),
                4 * _WIDTH,
                base_axis=2,
                name="up",
            )
            h = h + PF.affine(F.relu(g), _WIDTH, base_axis=2, name="down")
    return PF.affine(
        PF.layer_normalization(h, batch_axis=(0, 1), name="last"), symbols, base_axis=2, name="out"
    )


def _attention(h: nn.Variable, hidden: Floats) -> nn.Variable:
    batch, length, _ = h.shape
    size = _WIDTH // _HEADS

    def heads(name: str) -> nn.Variable:
        y = F.reshape(PF.affine(h, _WIDTH, base_axis=2, name=name), (batch, length, _HEADS, size))
        return F.reshape(F.transpose(y, (0, 2, 1, 3)), (batch * _HEADS, length, size))

    match = F.batch_matmul(heads("query"), heads("key"), transpose_b=True) * size**-0.5
    mask = F.broadcast(nn.Variable.from_numpy_array(hidden), match.shape)
    mixed = F.batch_matmul(F.softmax(match + mask, axis=2), heads("value"))
    mixed = F.transpose(F.reshape(mixed, (batch, _HEADS, length, size)), (0, 2, 1, 3))
    return PF.affine(F.reshape(mixed, (batch, length, _WIDTH)), _WIDTH, base_axis=2, name="mix")
