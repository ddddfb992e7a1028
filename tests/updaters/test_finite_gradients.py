# SPDX-License-Identifier: Apache-2.0
"""Which gradients make an update impossible."""

from __future__ import annotations

from typing import Any

import nnabla as nn
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss.kernels import CpuKernels
from nnabla_adaloss.updaters.finite_gradients import gradients_are_finite

pytestmark = pytest.mark.any_context


def solver_with(**gradients: Any) -> Any:
    parameters = {name: nn.Variable((2,), need_grad=True) for name in gradients}
    for name, v in parameters.items():
        v.d = 1.0
        if gradients[name] is None:
            v.grad.zero()
        else:
            v.g = np.asarray(gradients[name])
    solver = S.Sgd(0.1)
    solver.set_parameters(parameters)
    return solver


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_one_element_that_is_not_finite(bad: float, dtype: type) -> None:
    good = np.array([1.0, -2.0], dtype)
    assert gradients_are_finite(CpuKernels(), solver_with(a=good, b=good))
    solver = solver_with(a=good, b=np.array([1.0, bad], dtype))
    assert not gradients_are_finite(CpuKernels(), solver)
    assert solver.check_inf_or_nan_grad()


def test_what_is_lazily_zero_stays_so() -> None:
    solver = solver_with(a=None, b=[1.0, 2.0])
    assert gradients_are_finite(CpuKernels(), solver)
    assert solver.get_parameters()["a"].grad.zeroing
