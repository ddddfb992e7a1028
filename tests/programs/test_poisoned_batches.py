# SPDX-License-Identifier: Apache-2.0
"""Batch normalization, and a NaN in each tenth batch."""

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
    Examination,
    Outcome,
    Progress,
    Stream,
    assert_same_or_better,
    images,
    start,
    updater_of,
)

BATCH = 16


def network(count: int, *, test: bool) -> Tuple[nn.Variable, nn.Variable, nn.Variable, nn.Variable]:
    x, t = nn.Variable((count, 1, 8, 8)), nn.Variable((count, 1))
    h = PF.convolution(x, 6, (3, 3), with_bias=False, name="conv")
    h = F.tanh(PF.batch_normalization(h, batch_stat=not test, name="bn1"))
    h = PF.affine(h, 16, with_bias=False, name="hidden")
    h = F.tanh(PF.batch_normalization(h, batch_stat=not test, name="bn2"))
    y = PF.affine(h, CLASSES, name="output")
    return x, t, y, F.mean(F.softmax_cross_entropy(y, t))


def train(kind: str) -> Outcome:
    start()
    x_test, t_test, y_test, loss_test = network(200, test=True)
    x_test.d, t_test.d = images(np.random.default_rng(2), 200)
    examination = Examination(loss_test, y_test)

    x, t, _, loss = network(BATCH, test=False)
    stream = Stream(150, overflow=(25, 26, 88))

    def feed() -> None:
        x.d, t.d = images(stream.next(), BATCH)
        if stream.number % 10 == 9:
            x.d[3, 0, 2, 5] = np.nan

    solver = S.Momentum(0.02)
    solver.set_parameters(nn.get_parameters())
    # nnabla's updater takes each NaN for an overflow: it ends with a scale of 2**-6.
    policy = {"on_nonfinite_loss": "skip"} if kind != "dynamic" else {}
    updater = updater_of(kind, solver, stream.gated(loss), feed, scale=2.0**12, N=2000, **policy)
    progress = Progress(solver, stream)
    while stream.left:
        updater.update()
        progress.note()
    if kind == "dynamic":
        renew_statistics(x, loss)
    return examination.outcome(progress.learned)


def renew_statistics(x: nn.Variable, loss: nn.Variable) -> None:
    """What nnabla's updater is left with: running statistics are NaN for ever after the first NaN."""
    for name, v in nn.get_parameters(grad_only=False).items():
        if name.endswith(("/mean", "/var")):
            assert np.isnan(v.d).all(), name
            v.d = 0.0 if name.endswith("/mean") else 1.0
    for i in range(60):
        x.d, _ = images(np.random.default_rng((4, i)), BATCH)
        loss.forward()


@pytest.mark.slow
def test_running_statistics_survive_poisoned_batches() -> None:
    assert_same_or_better(train("adaptive"), train("dynamic"), tolerance=0.05)
