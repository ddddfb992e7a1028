# SPDX-License-Identifier: Apache-2.0
"""Two losses on one trunk, with weights of 1 and 1e-8."""

from __future__ import annotations

from typing import NamedTuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from tests.programs.programs import (
    CLASSES,
    FEATURES,
    Examination,
    Outcome,
    Progress,
    Stream,
    assert_same_or_better,
    points,
    start,
    updater_of,
)

BATCH = 32


class Network(NamedTuple):
    """Classifies points, and gives their coordinates back."""

    x: nn.Variable
    t: nn.Variable
    y: nn.Variable
    main: nn.Variable
    auxiliary: nn.Variable


def network(count: int) -> Network:
    x, t = nn.Variable((count, FEATURES)), nn.Variable((count, 1))
    h = F.tanh(PF.affine(x, 32, name="trunk1"))
    h = F.tanh(PF.affine(h, 32, name="trunk2"))
    y = PF.affine(F.tanh(PF.affine(h, 16, name="main1")), CLASSES, name="main2")
    decoded = PF.affine(F.tanh(PF.affine(h, 16, name="auxiliary1")), FEATURES, name="auxiliary2")
    main = F.mean(F.softmax_cross_entropy(y, t))
    return Network(x, t, y, main, F.sum((decoded - x) ** 2))


class Trained(NamedTuple):
    """What came out, and the loss scale at the end."""

    outcome: Outcome
    scale: float


def train(kind: str) -> Trained:
    start()
    test = network(200)
    test.x.d, test.t.d = points(np.random.default_rng(2), 200)
    examination = Examination(test.main, test.y)

    net = network(BATCH)
    stream = Stream(200, overflow=(20, 60, 100, 160))

    def feed() -> None:
        net.x.d, net.t.d = points(stream.next(), BATCH)

    solver = S.Momentum(0.05)
    solver.set_parameters(nn.get_parameters())
    updater = updater_of(kind, solver, stream.gated(net.main + 1e-8 * net.auxiliary), feed, scale=2.0**15)
    progress = Progress(solver, stream)
    while stream.left:
        updater.update()
        progress.note()
    return Trained(examination.outcome(progress.learned), updater.scale)


@pytest.mark.slow
def test_an_auxiliary_loss_of_small_weight_does_no_harm() -> None:
    ours, theirs = train("adaptive"), train("dynamic")
    assert_same_or_better(ours.outcome, theirs.outcome, tolerance=0.02)
    assert ours.scale >= theirs.scale
