# SPDX-License-Identifier: Apache-2.0
"""The order of calls for each of several solvers, and the parameters of all of them."""

from __future__ import annotations

from typing import Any, List

import nnabla as nn
import nnabla.solvers as S
import pytest

from nnabla_adaloss.scalers.solver_steps import SolverSteps


def solver(*names: str) -> Any:
    made = S.Sgd(0.1)
    made.set_parameters({name: nn.Variable((2,), need_grad=True) for name in names})
    return made


def test_gradients_are_looked_at_once_and_before_they_are_changed() -> None:
    first, second = solver("a"), solver("b")
    steps = SolverSteps([first, second])
    looked: List[Any] = []

    def is_finite(one: Any) -> bool:
        looked.append(one)
        return one is first

    steps.unscale(0, is_finite)
    assert looked == [first]
    assert steps.step(0, is_finite)
    assert looked == [first]
    assert not steps.step(1, is_finite)
    assert looked == [first, second]


def test_each_solver_has_one_call_of_each_kind_per_iteration() -> None:
    steps = SolverSteps([solver("a"), solver("b")])
    for _ in range(2):
        steps.unscale(0, lambda _: True)
        with pytest.raises(RuntimeError, match="already been called"):
            steps.unscale(0, lambda _: True)
        assert steps.step(0, lambda _: False)
        with pytest.raises(RuntimeError, match="called after step"):
            steps.unscale(0, lambda _: True)
        with pytest.raises(RuntimeError, match="already been called"):
            steps.step(0, lambda _: True)
        assert not steps.step(1, lambda _: False)
        steps.begin()


def test_parameters_with_one_name_are_told_apart() -> None:
    shared = nn.Variable((2,), need_grad=True)
    first, second = S.Sgd(0.1), S.Sgd(0.1)
    first.set_parameters({"w": nn.Variable((2,), need_grad=True), "shared": shared})
    second.set_parameters({"w": nn.Variable((2,), need_grad=True), "shared": shared})
    steps = SolverSteps([first, second])
    assert sorted(steps.named_parameters()) == ["1/w", "shared", "w"]
    assert list(steps.parameters(without=first)) == list(second.get_parameters().values())
    assert len(list(steps.parameters())) == 4
