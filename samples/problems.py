# SPDX-License-Identifier: Apache-2.0
"""Problems of the demo and of the comparison: digits, by one loss or by two."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, NamedTuple

import nnabla as nn
import nnabla.functions as F
import nnabla.solvers as S
import two_losses
from networks import NETWORKS, Network


class Problem(NamedTuple):
    """Loss and its training settings.

    Attributes:
        title: its description.
        before_weight: text before a loss weight.
        build: makes the logits of digits, shape (batch, 10), from images of shape (batch, 1, 8, 8).
        loss: makes the loss from images, labels of shape (batch, 1), and the loss weight.
        solver: makes the solver from the loss weight, with the same steps in fp32 for each.
        batch_size: images per batch.
    """

    title: str
    before_weight: str
    build: Callable[[nn.Variable], nn.Variable]
    loss: Callable[[nn.Variable, nn.Variable, float], nn.Variable]
    solver: Callable[[float], Any]
    batch_size: int


def _cross_entropy(network: Network, x: nn.Variable, t: nn.Variable, weight: float) -> nn.Variable:
    return F.mean(F.softmax_cross_entropy(network.build(x), t)) * weight


def _momentum(learning_rate: float, weight: float) -> Any:
    # SGD moves weights by learning rate times gradient: this cancels the loss weight.
    return S.Momentum(learning_rate / weight, 0.9)


def _with_one_loss(network: Network) -> Problem:
    return Problem(
        network.title,
        "",
        network.build,
        partial(_cross_entropy, network),
        partial(_momentum, network.learning_rate),
        network.batch_size,
    )


PROBLEMS = {
    **{name: _with_one_loss(network) for name, network in NETWORKS.items()},
    "two_losses": Problem(
        "Two losses: accuracy of the second",
        "1:",
        lambda x: two_losses.heads(x)[1],
        two_losses.weighted_sum,
        lambda _: two_losses.solver(),
        two_losses.BATCH_SIZE,
    ),
}
