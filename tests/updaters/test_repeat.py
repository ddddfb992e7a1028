# SPDX-License-Identifier: Apache-2.0
"""A batch that is run again is not lost, and nothing of it counts twice."""

from __future__ import annotations

from typing import Any

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import AdaptiveLossScalingUpdater


def mean_square(batch: int = 8) -> nn.Variable:
    rng = np.random.RandomState(0)
    x = nn.Variable.from_numpy_array(rng.randn(batch, 8).astype(np.float32))
    h = F.tanh(PF.affine(x, 8, name="a", rng=rng))
    return F.mean(PF.affine(h, 8, name="b", rng=rng) ** 2)


def updater_of(loss: nn.Variable, **options: Any) -> AdaptiveLossScalingUpdater:
    solver = S.Sgd(0.01)
    solver.set_parameters(nn.get_parameters())
    return AdaptiveLossScalingUpdater(solver, loss, **{"storage": "float16", **options})


@pytest.mark.parametrize("accum_grad", [1, 3])
def test_what_a_users_function_counts_is_counted_once(accum_grad: int) -> None:
    """The first batch is repeated before it is known what forward writes."""
    loss = mean_square()
    counter = nn.parameter.get_parameter_or_create("counter", (1,), np.zeros(1), need_grad=False)
    loss = loss + F.sum(F.assign(counter, counter + 1.0)) * 0.0
    updater = updater_of(loss, accum_grad=accum_grad)
    assert updater.update().retries == 1
    assert float(counter.d[0]) == accum_grad
    updater.update()
    assert float(counter.d[0]) == 2 * accum_grad
