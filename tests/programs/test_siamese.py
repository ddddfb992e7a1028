# SPDX-License-Identifier: Apache-2.0
"""A siamese net: two images go through the same weights, and are told apart by their distance."""

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
    images,
    start,
    updater_of,
)

BATCH = 24
MARGIN = 1.0


def embedding(x: nn.Variable) -> nn.Variable:
    with nn.parameter_scope("tower"):
        h = F.elu(PF.convolution(x, 6, (3, 3), name="conv"))
        h = F.elu(PF.affine(h, 24, name="hidden"))
        return PF.affine(h, 4, name="embedding")


def network(count: int) -> Tuple[nn.Variable, nn.Variable, nn.Variable, nn.Variable, nn.Variable]:
    left, right = nn.Variable((count, 1, 8, 8)), nn.Variable((count, 1, 8, 8))
    same = nn.Variable((count,))
    squared = F.sum((embedding(left) - embedding(right)) ** 2, axis=1)
    gap = F.maximum_scalar(MARGIN - (squared + 1e-3) ** 0.5, 0.0)
    return left, right, same, squared, F.mean(same * squared + (1.0 - same) * gap**2)


def pairs(rng: np.random.Generator, count: int) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    left, ours = images(rng, count)
    right, theirs = images(rng, count)
    return left, right, (ours == theirs)[:, 0]


def train(kind: str) -> Outcome:
    start()
    left, right, same, squared, loss = network(200)
    left.d, right.d, same.d = pairs(np.random.default_rng(2), 200)
    examination = Examination(loss, squared)

    left, right, same, _, loss = network(BATCH)
    stream = Stream(200, overflow=(0, 50, 51, 52, 140))

    def feed() -> None:
        left.d, right.d, same.d = pairs(stream.next(), BATCH)

    solver = S.Adam(0.003)
    solver.set_parameters(nn.get_parameters())
    updater = updater_of(kind, solver, stream.gated(loss), feed, weight_decay=1e-4)
    progress = Progress(solver, stream)
    while stream.left:
        updater.update()
        progress.note()
    return examination.outcome(progress.learned)


@pytest.mark.slow
def test_two_towers_that_share_their_weights() -> None:
    assert_same_or_better(train("adaptive"), train("dynamic"), tolerance=0.02)
