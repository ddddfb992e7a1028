# SPDX-License-Identifier: Apache-2.0
"""A recurrent net that is built anew for each batch, as long as the sequences in it are."""

from __future__ import annotations

from typing import Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from tests.programs.programs import (
    Examination,
    Outcome,
    Progress,
    Stream,
    assert_same_or_better,
    emulated,
    start,
    updater_of,
)

BATCH = 24
WIDTH = 3
STATE = 20


def network(count: int, length: int) -> Tuple[nn.Variable, nn.Variable, nn.Variable, nn.Variable]:
    x, t = nn.Variable((count, length, WIDTH)), nn.Variable((count, 1))
    h = F.constant(0.0, (count, STATE))
    for i in range(length):
        step = F.reshape(x[:, i : i + 1, :], (count, WIDTH))
        h = F.tanh(PF.affine(step, STATE, name="in") + PF.affine(h, STATE, with_bias=False, name="recurrent"))
    y = PF.affine(h, 1, name="out")
    return x, t, y, F.mean(F.sigmoid_cross_entropy(y, t))


def sequences(rng: np.random.Generator, count: int, length: int) -> Tuple[np.ndarray, np.ndarray]:
    """Sequences, and whether the sum of their first channel is positive."""
    x = rng.standard_normal((count, length, WIDTH))
    return x, (x[:, :, 0].sum(axis=1, keepdims=True) > 0.0).astype(np.int64)


def train(kind: str) -> Outcome:
    start()
    x_test, t_test, y_test, loss_test = network(200, 6)
    x_test.d, t_test.d = sequences(np.random.default_rng(2), 200, 6)
    examination = Examination(loss_test, y_test)

    stream = Stream(120, overflow=(15, 16, 60, 100))
    lengths = np.random.default_rng(3)
    x, t, _, loss = network(BATCH, 3)

    def feed() -> None:
        x.d, t.d = sequences(stream.next(), BATCH, x.shape[1])

    solver = S.Adam(0.01)
    solver.set_parameters(nn.get_parameters())
    updater = updater_of(kind, solver, loss, feed)
    progress = Progress(solver, stream)
    while stream.left:
        x, t, _, loss = network(BATCH, int(lengths.integers(2, 7)))
        updater.loss = emulated(kind, stream.gated(loss))
        updater.update()
        progress.note()
    return examination.outcome(progress.learned)


@pytest.mark.slow
def test_a_graph_that_is_built_anew_in_each_iteration() -> None:
    assert_same_or_better(train("adaptive"), train("dynamic"), tolerance=0.02)
