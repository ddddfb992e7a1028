# SPDX-License-Identifier: Apache-2.0
"""The parameters of several solvers. The order of calls is tested with `GradScaler`."""

from __future__ import annotations

import nnabla as nn
import nnabla.solvers as S

from nnabla_adaloss.scalers.solver_steps import SolverSteps


def test_parameters_with_one_name_are_told_apart() -> None:
    shared = nn.Variable((2,), need_grad=True)
    first, second = S.Sgd(0.1), S.Sgd(0.1)
    for solver in (first, second):
        solver.set_parameters({"w": nn.Variable((2,), need_grad=True), "shared": shared})
    steps = SolverSteps([first, second])
    assert sorted(steps.named_parameters()) == ["1/w", "shared", "w"]
    assert list(steps.parameters(without=first)) == list(second.get_parameters().values())
    assert len(list(steps.parameters())) == 4
