# SPDX-License-Identifier: Apache-2.0
"""A likelihood of counts, where there are any: where there are none, a logarithm of 0 is not taken."""

from __future__ import annotations

from typing import Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from tests.programs.programs import (
    FEATURES,
    Examination,
    Outcome,
    Progress,
    Stream,
    assert_same_or_better,
    planted,
    points,
    start,
    updater_of,
)

BATCH, BATCHES = 32, 1000


def network(count: int) -> Tuple[nn.Variable, nn.Variable, nn.Variable, nn.Variable]:
    x, t = nn.Variable((count, FEATURES)), nn.Variable((count, 1))
    rate = F.softplus(PF.affine(F.tanh(PF.affine(x, 32, name="hidden")), 1, name="rate"))
    some = F.minimum_scalar(t, 1.0)
    # In float16 the constant is 0: where there is no count, the logarithm and its slope are infinite.
    logarithm = F.log(F.maximum_scalar(rate * some, 1e-12))
    return x, t, rate, F.mean(F.where(some, rate - t * logarithm, rate))


def train(kind: str) -> Outcome:
    start()
    x_test, t_test, y_test, loss_test = network(300)
    x_test.d, t_test.d = points(np.random.default_rng(2), 300)
    examination = Examination(loss_test, y_test)

    x, t, _, loss = network(BATCH)
    stream = Stream(BATCHES, overflow=planted(BATCHES))

    def feed() -> None:
        x.d, t.d = points(stream.next(), BATCH)

    solver = S.Momentum(0.01)
    solver.set_parameters(nn.get_parameters())
    # Forward is infinite in each batch, and taken for the cause where a gradient is, too, whatever the scale.
    # No scale is lowered then, and it would soon grow to where a batch is lost for each time that it does.
    policy = {"on_nonfinite_forward": "skip"} if kind != "dynamic" else {}
    updater = updater_of(kind, solver, stream.gated(loss), feed, N=200, **policy)
    progress = Progress(solver, stream)
    masked = 0
    while stream.left:
        result = updater.update()
        progress.note()
        masked += bool(kind != "dynamic" and result.nonfinite_layers)
    # Only passes with hooks look at single functions, and what is masked reaches no parameter.
    assert kind != "adaptive" or masked, "no gradient had to be masked"
    return examination.outcome(progress.learned)


@pytest.mark.slow
def test_a_logarithm_of_zero_in_the_branch_that_is_not_taken() -> None:
    assert_same_or_better(train("adaptive"), train("dynamic"), tolerance=0.02)
