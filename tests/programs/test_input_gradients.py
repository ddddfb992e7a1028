# SPDX-License-Identifier: Apache-2.0
"""Inputs that need gradients, for a look at what a net sees, and that no solver clears."""

from __future__ import annotations

from typing import List, NamedTuple, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from tests.programs.programs import (
    CLASSES,
    Examination,
    Outcome,
    Progress,
    Stream,
    assert_same_or_better,
    images,
    planted,
    start,
    updater_of,
)

BATCH, BATCHES = 16, 1000


def network(count: int) -> Tuple[nn.Variable, nn.Variable, nn.Variable, nn.Variable]:
    x, t = nn.Variable((count, 1, 8, 8)), nn.Variable((count, 1))
    h = F.elu(PF.convolution(x, 6, (3, 3), name="conv"))
    y = PF.affine(F.tanh(PF.affine(h, 16, name="hidden")), CLASSES, name="output")
    return x, t, y, F.mean(F.softmax_cross_entropy(y, t))


class Trained(NamedTuple):
    """What came out, and how large the inputs' gradients were in the end."""

    outcome: Outcome
    salience: List[float]


def train(kind: str) -> Trained:
    start()
    x_test, t_test, y_test, loss_test = network(200)
    x_test.d, t_test.d = images(np.random.default_rng(2), 200)
    examination = Examination(loss_test, y_test)

    x, t, _, loss = network(BATCH)
    x.need_grad = True
    stream = Stream(BATCHES, overflow=planted(BATCHES))

    def feed() -> None:
        x.d, t.d = images(stream.next(), BATCH)

    solver = S.Momentum(0.01)
    solver.set_parameters(nn.get_parameters())
    updater = updater_of(kind, solver, stream.gated(loss), feed)
    progress = Progress(solver, stream)
    salience: List[float] = []
    while stream.left:
        updater.update()
        progress.note()
        salience.append(float(np.abs(x.g).max()))
    return Trained(examination.outcome(progress.learned), salience)


@pytest.mark.slow
def test_inputs_whose_gradients_nobody_clears() -> None:
    ours, theirs = train("adaptive"), train("dynamic")
    assert_same_or_better(ours.outcome, theirs.outcome, tolerance=0.02)
