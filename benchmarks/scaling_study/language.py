# SPDX-License-Identifier: Apache-2.0
"""Small language model: a transformer that predicts the next letter."""

from __future__ import annotations

import nnabla as nn
import nnabla.functions as F
import numpy as np
from common.text import text, windows
from transformer import logits

from .task import Player, Task

_BATCH, _LENGTH, _WIDTH = 8, 32, 32
_TEST_WINDOWS = 256


def transformer(seed: int) -> Task:
    """Make a training that is scored by minus the mean loss of a test letter, in nats."""
    train, test, symbols = text()
    x, t = nn.Variable((_BATCH, _LENGTH)), nn.Variable((_BATCH, _LENGTH, 1))
    loss = F.mean(F.softmax_cross_entropy(logits(x, symbols, _WIDTH), t))
    parameters = nn.get_parameters()
    random = np.random.RandomState(seed)

    def feed() -> None:
        seen, following = windows(train, random.randint(0, len(train) - _LENGTH - 1, _BATCH), _LENGTH)
        x.d, t.d = seen, following[:, :, np.newaxis]

    starts = np.linspace(0, len(test) - _LENGTH - 2, _TEST_WINDOWS).astype(np.int64)
    seen, following = windows(test, starts, _LENGTH)
    told = logits(nn.Variable.from_numpy_array(seen), symbols, _WIDTH)
    following_variable = nn.Variable.from_numpy_array(following[:, :, np.newaxis])
    test_loss = F.mean(F.softmax_cross_entropy(told, following_variable))

    def score() -> float:
        test_loss.forward(clear_buffer=True)
        return -float(test_loss.d)

    return Task([Player(loss, parameters, feed)], score)
