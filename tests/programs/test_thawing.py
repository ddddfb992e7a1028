# SPDX-License-Identifier: Apache-2.0
"""Layers that are frozen for the first half of a training, and trained with the others in the second."""

from __future__ import annotations

from typing import List, Mapping, Tuple

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
    checksum,
    planted,
    points,
    start,
    updater_of,
    values_of,
)

BATCH, BATCHES = 32, 1000


def network(count: int) -> Tuple[nn.Variable, nn.Variable, nn.Variable, nn.Variable]:
    x, t = nn.Variable((count, FEATURES)), nn.Variable((count, 1))
    h = x
    with nn.parameter_scope("lower"):
        for name in ("fc1", "fc2"):
            h = F.tanh(PF.affine(h, 32, name=name))
    with nn.parameter_scope("upper"):
        y = PF.affine(F.tanh(PF.affine(h, 16, name="fc3")), CLASSES, name="fc4")
    return x, t, y, F.mean(F.softmax_cross_entropy(y, t))


def leaves(loss: nn.Variable, parameters: Mapping[str, nn.Variable]) -> List[nn.Variable]:
    """Parameters as a graph has them: nnabla registers others, with a `need_grad` of their own."""
    arrays = {v.data for v in parameters.values()}
    found: List[nn.Variable] = []
    loss.visit(lambda f: found.extend(v for v in f.inputs if v.parent is None and v.data in arrays))
    return found


def train(kind: str) -> Outcome:
    start()
    x_test, t_test, y_test, loss_test = network(300)
    x_test.d, t_test.d = points(np.random.default_rng(2), 300)
    examination = Examination(loss_test, y_test)

    with nn.parameter_scope("lower"):
        lower = nn.get_parameters()
    with nn.parameter_scope("upper"):
        upper = nn.get_parameters()
    x, t, _, loss = network(BATCH)
    frozen = leaves(loss, lower)
    for v in frozen:
        v.need_grad = False
    stream = Stream(BATCHES, overflow=planted(BATCHES))

    def feed() -> None:
        x.d, t.d = points(stream.next(), BATCH)

    solver = S.Momentum(0.02)
    solver.set_parameters({f"upper/{name}": v for name, v in upper.items()})
    updater = updater_of(kind, solver, stream.gated(loss), feed)
    progress = Progress(solver, stream)
    before = checksum(values_of(lower))
    while stream.left:
        if stream.number >= BATCHES // 2 and frozen:
            assert checksum(values_of(lower)) == before
            while frozen:
                frozen.pop().need_grad = True
            solver.set_parameters(
                {f"lower/{name}": v for name, v in lower.items()}, reset=False, retain_state=True
            )
        updater.update()
        progress.note()
    assert checksum(values_of(lower)) != before
    return examination.outcome(progress.learned)


@pytest.mark.slow
def test_layers_that_are_thawed_midway() -> None:
    assert_same_or_better(train("adaptive"), train("dynamic"), tolerance=0.02)
