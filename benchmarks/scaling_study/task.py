# SPDX-License-Identifier: Apache-2.0
"""What a training is made of, whatever it trains."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Dict, NamedTuple, Sequence

import nnabla as nn
import nnabla.solvers as S


class Player(NamedTuple):
    """A loss and what it trains; a GAN has two, everything else one.

    Attributes:
        loss: the loss, without the loss weight.
        parameters: what is trained, by name.
        feed: fills the inputs with the next batch.
    """

    loss: nn.Variable
    parameters: Dict[str, nn.Variable]
    feed: Callable[[], Any]


class Task(NamedTuple):
    """A network that is ready to be trained.

    Attributes:
        players: whose updates take turns.
        score: how good the network is now; larger is better. It runs in fp32.
    """

    players: Sequence[Player]
    score: Callable[[], float]


class Net(NamedTuple):
    """A network of the study.

    Attributes:
        title: what it is.
        measure: what its score is.
        build: makes it, from the seed that decides its batches.
        learning_rate: that of the solver when the loss weight is 1; it falls to zero linearly.
        iterations: batches of each player.
        resolution: a difference of scores that means nothing.
        solver: makes the solver from its learning rate.
    """

    title: str
    measure: str
    build: Callable[[int], Task]
    learning_rate: float
    iterations: int
    resolution: float
    solver: Callable[[float], Any] = partial(S.Momentum, momentum=0.9)
