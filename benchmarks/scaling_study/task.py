# SPDX-License-Identifier: Apache-2.0
"""Parts of a training of any network."""

from __future__ import annotations

from typing import Any, Callable, Dict, NamedTuple, Optional, Sequence

import nnabla as nn
import nnabla.functions as F
import nnabla.solvers as S
from common.digits import Examples, load


class Player(NamedTuple):
    """Loss with its parameters; a GAN has two, all others one."""

    loss: nn.Variable
    parameters: Dict[str, nn.Variable]
    feed: Callable[[], Any]


class Task(NamedTuple):
    """Network that is ready to be trained."""

    players: Sequence[Player]
    score: Callable[[], float]


def momentum(learning_rate: float) -> Any:
    """Make SGD with momentum, the usual solver."""
    return S.Momentum(learning_rate, 0.9)


class Net(NamedTuple):
    """Network and its training settings."""

    title: str
    measure: str
    build: Callable[[int], Task]
    learning_rate: float  # for a loss weight of 1
    iterations: int  # batches of each player
    resolution: float  # insignificant difference of scores
    solver: Callable[[float], Any] = momentum


def accuracy(
    logits: Callable[[nn.Variable], nn.Variable], test: Optional[Examples] = None
) -> Callable[[], float]:
    """Make a function that computes the accuracy on test images."""
    x, t = test or load().test
    told = logits(nn.Variable.from_numpy_array(x))

    def score() -> float:
        told.forward(clear_buffer=True)
        return float((told.d.argmax(axis=1) == t[:, 0]).mean())

    return score


def cross_entropy(logits: nn.Variable, t: nn.Variable) -> nn.Variable:
    """Compute the mean cross entropy."""
    return F.mean(F.softmax_cross_entropy(logits, t))
