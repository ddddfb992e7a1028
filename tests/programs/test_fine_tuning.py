# SPDX-License-Identifier: Apache-2.0
"""A head is trained on a backbone that needs gradients, too, but that no solver has."""

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
    planted,
    start,
    updater_of,
)

BATCH, BATCHES = 16, 1000


def backbone(x: nn.Variable) -> nn.Variable:
    with nn.parameter_scope("backbone"):
        h = F.relu(PF.convolution(x, 8, (3, 3), name="conv1"))
        h = F.relu(PF.convolution(h, 8, (3, 3), name="conv2"))
        return F.tanh(PF.affine(h, 24, name="features"))


def pretrain() -> None:
    """Teach the backbone which quarter of an image is bright."""
    x, t = nn.Variable((BATCH, 1, 8, 8)), nn.Variable((BATCH, 1))
    loss = F.mean(F.softmax_cross_entropy(PF.affine(backbone(x), CLASSES, name="old_head"), t))
    solver = S.Momentum(0.05)
    solver.set_parameters(nn.get_parameters())
    for i in range(40):
        x.d, t.d = images(np.random.default_rng((1, i)), BATCH)
        loss.forward(clear_no_need_grad=True)
        solver.zero_grad()
        loss.backward(clear_buffer=True)
        solver.update()


def network(count: int) -> Tuple[nn.Variable, nn.Variable, nn.Variable, nn.Variable]:
    x, t = nn.Variable((count, 1, 8, 8)), nn.Variable((count, 1))
    h = backbone(x)
    with nn.parameter_scope("head"):
        y = PF.affine(F.tanh(PF.affine(h, 16, name="hidden")), 1, name="output")
    return x, t, y, F.mean(F.sigmoid_cross_entropy(y, t))


def batch(rng: np.random.Generator, count: int) -> Tuple[np.ndarray, np.ndarray]:
    """The new task: is the bright quarter on the diagonal?"""
    x, quarter = images(rng, count)
    return x, np.isin(quarter, (0, 3)).astype(np.int64)


def train(kind: str) -> Outcome:
    start()
    with nn.context_scope(nn.Context(["cpu:float"], "CpuCachedArray", "0")):
        pretrain()
    x_test, t_test, y_test, loss_test = network(200)
    x_test.d, t_test.d = batch(np.random.default_rng(2), 200)
    examination = Examination(loss_test, y_test)

    x, t, _, loss = network(BATCH)
    stream = Stream(BATCHES, overflow=planted(BATCHES))

    def feed() -> None:
        x.d, t.d = batch(stream.next(), BATCH)

    solver = S.Momentum(0.02)
    with nn.parameter_scope("head"):
        solver.set_parameters(nn.get_parameters())
    updater = updater_of(kind, solver, stream.gated(loss), feed)
    progress = Progress(solver, stream)
    while stream.left:
        updater.update()
        progress.note()
    return examination.outcome(progress.learned)


@pytest.mark.slow
def test_a_head_on_a_backbone_that_is_not_trained() -> None:
    assert_same_or_better(train("adaptive"), train("dynamic"), tolerance=0.02)
