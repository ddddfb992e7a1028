# SPDX-License-Identifier: Apache-2.0
"""A net is trained and saved; its layers are loaded into another net with another head, which goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Tuple

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
    checksum,
    images,
    start,
    updater_of,
    values_of,
)

BATCH = 16

Network = Callable[[int], Tuple[nn.Variable, nn.Variable, nn.Variable, nn.Variable]]


def body(x: nn.Variable) -> nn.Variable:
    with nn.parameter_scope("body"):
        h = F.relu(PF.convolution(x, 8, (3, 3), name="conv1"))
        h = F.max_pooling(h, (2, 2))
        return F.tanh(PF.affine(h, 24, name="features"))


def quarters(count: int) -> Tuple[nn.Variable, nn.Variable, nn.Variable, nn.Variable]:
    """Which quarter is bright?"""
    x, t = nn.Variable((count, 1, 8, 8)), nn.Variable((count, 1))
    y = PF.affine(body(x), CLASSES, name="quarters")
    return x, t, y, F.mean(F.softmax_cross_entropy(y, t))


def diagonals(count: int) -> Tuple[nn.Variable, nn.Variable, nn.Variable, nn.Variable]:
    """Is the bright quarter on the diagonal?"""
    x, t = nn.Variable((count, 1, 8, 8)), nn.Variable((count, 1))
    y = PF.affine(F.tanh(PF.affine(body(x), 12, name="diagonals1")), 1, name="diagonals2")
    return x, t, y, F.mean(F.sigmoid_cross_entropy(y, F.less_scalar(F.abs(t - 1.5), 1.0) * -1.0 + 1.0))


def trained(kind: str, network: Network, stream: Stream, name: str) -> Tuple[Examination, Any]:
    x_test, t_test, y_test, loss_test = network(200)
    x_test.d, t_test.d = images(np.random.default_rng(2), 200)
    examination = Examination(loss_test, y_test)
    x, t, _, loss = network(BATCH)

    def feed() -> None:
        x.d, t.d = images(stream.next(), BATCH)

    solver = S.Momentum(0.02)
    solver.set_parameters(nn.get_parameters())
    updater = updater_of(kind, solver, stream.gated(loss), feed, weight_decay=1e-4)
    progress = Progress(solver, stream, name)
    while stream.left:
        updater.update()
        progress.note()
    return examination, progress.learned


def train(kind: str, path: Path) -> Outcome:
    start()
    stream = Stream(100, overflow=(20, 70, 99))  # the last batch overflows, the one behind it is learned
    _, first = trained(kind, quarters, stream, "quarters")
    with nn.parameter_scope("body"):
        saved = checksum(values_of(nn.get_parameters()))
        nn.save_parameters(str(path))

    start()
    with nn.parameter_scope("body"):
        nn.load_parameters(str(path))
        assert checksum(values_of(nn.get_parameters())) == saved
    stream = Stream(100, overflow=(0, 50), seed=1)
    examination, second = trained(kind, diagonals, stream, "diagonals")
    return examination.outcome([*first, *second])


@pytest.mark.slow
def test_layers_that_go_on_in_another_net(tmp_path: Path) -> None:
    path = tmp_path / "body.h5"
    assert_same_or_better(train("adaptive", path), train("dynamic", path), tolerance=0.02)
