# SPDX-License-Identifier: Apache-2.0
"""One net and one loss, but a solver for each half of the layers; they take turns."""

from __future__ import annotations

from typing import Tuple

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


def network(count: int) -> Tuple[nn.Variable, nn.Variable, nn.Variable, nn.Variable]:
    x, t = nn.Variable((count, FEATURES)), nn.Variable((count, 1))
    with nn.parameter_scope("encoder"):
        h = F.tanh(PF.affine(x, 32, name="fc1"))
        h = F.tanh(PF.affine(h, 32, name="fc2"))
    with nn.parameter_scope("classifier"):
        y = PF.affine(F.tanh(PF.affine(h, 16, name="fc3")), CLASSES, name="fc4")
    return x, t, y, F.mean(F.softmax_cross_entropy(y, t))


def train(kind: str) -> Outcome:
    start()
    x_test, t_test, y_test, loss_test = network(300)
    x_test.d, t_test.d = points(np.random.default_rng(2), 300)
    examination = Examination(loss_test, y_test)

    x, t, _, loss = network(BATCH)
    stream = Stream(240, overflow=(12, 45, 46, 101, 180))
    loss = stream.gated(loss)

    def feed() -> None:
        x.d, t.d = points(stream.next(), BATCH)

    encoder, classifier = S.Adam(0.003), S.Momentum(0.05)
    turns = []
    for solver, scope in ((encoder, "encoder"), (classifier, "classifier")):
        with nn.parameter_scope(scope):
            solver.set_parameters(nn.get_parameters())
        turns.append((updater_of(kind, solver, loss, feed), Progress(solver, stream)))
    while stream.left:
        for updater, progress in turns:
            updater.update()
            progress.note()
    return examination.outcome([batch for _, progress in turns for batch in progress.learned])


@pytest.mark.slow
def test_two_solvers_that_take_turns() -> None:
    assert_same_or_better(train("adaptive"), train("dynamic"), tolerance=0.02)
