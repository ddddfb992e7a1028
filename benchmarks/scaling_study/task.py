# SPDX-License-Identifier: Apache-2.0
"""What a training is made of, whatever it trains."""

from __future__ import annotations

from typing import Any, Callable, Dict, NamedTuple, Optional, Sequence

import nnabla as nn
import nnabla.functions as F
import nnabla.solvers as S
from common.digits import Examples, load


class Player(NamedTuple):
    """A loss and what it trains; a GAN has two, everything else one."""

    loss: nn.Variable
    parameters: Dict[str, nn.Variable]
    feed: Callable[[], Any]


class Task(NamedTuple):
    """A network that is ready to be trained."""

    players: Sequence[Player]
    score: Callable[[], float]


def momentum(learning_rate: float) -> Any:
    """SGD with momentum, as most networks are trained."""
    return S.Momentum(learning_rate, 0.9)


class Net(NamedTuple):
    """A network and how it is trained."""

    title: str
    measure: str
    build: Callable[[int], Task]
    learning_rate: float  # when the loss weight is 1
    iterations: int  # batches of each player
    resolution: float  # a difference of scores that means nothing
    solver: Callable[[float], Any] = momentum


def accuracy(
    logits: Callable[[nn.Variable], nn.Variable], test: Optional[Examples] = None
) -> Callable[[], float]:
    """What tells the accuracy on images that are not trained on."""
    x, t = test or load().test
    told = logits(nn.Variable.from_numpy_array(x))

    def score() -> float:
        told.forward(clear_buffer=True)
        return float((told.d.argmax(axis=1) == t[:, 0]).mean())

    return score


def cross_entropy(logits: nn.Variable, t: nn.Variable) -> nn.Variable:
    """The mean cross entropy."""
    return F.mean(F.softmax_cross_entropy(logits, t))
