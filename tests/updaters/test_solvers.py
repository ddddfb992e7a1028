# SPDX-License-Identifier: Apache-2.0
"""Solvers written in Python train as those that they wrap, or are refused by the method that they lack."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Type

import nnabla as nn
import nnabla.solvers as S
import pytest
from nnabla.experimental.mixed_precision_training import DynamicLossScalingUpdater
from nnabla.solver import Solver

from nnabla_adaloss import (
    AdaptiveLossScaling,
    AdaptiveLossScalingUpdater,
    FormatEmulation,
    GradScaler,
    diagnose,
    save_checkpoint,
)
from tests.worlds.monitors import Records
from tests.worlds.networks import two_layers
from tests.worlds.trainings import scaler_step, solver_of
from tests.worlds.values import assert_equal, data, snapshot

METHODS = ("zero_grad", "update", "weight_decay", "scale_grad", "get_parameters")


def written_in_python(*methods: str) -> Type[Solver]:
    """A class of solvers that hand these methods on to another solver, as published ones do."""

    def handed_on(name: str) -> Any:
        return lambda self, *arguments: getattr(self.wrapped, name)(*arguments)

    def wrap(self: Any, wrapped: Any) -> None:
        self.wrapped = wrapped

    return type("Wrapper", (Solver,), {"__init__": wrap, **{name: handed_on(name) for name in methods}})


@pytest.mark.parametrize("loop", ["updater", "scaler"])
def test_a_solver_written_in_python_trains_as_the_one_that_it_wraps(loop: str) -> None:
    found = []
    for wraps in (False, True):
        nn.clear_parameters()
        loss = two_layers(data(4, 3))
        solver = solver_of(S.Momentum(0.1))
        if wraps:
            solver = written_in_python(*METHODS)(solver)
        if loop == "scaler":
            scaler = GradScaler(solver, storage="float16")
            assert all(scaler_step(scaler, solver, loss) for _ in range(3))
        else:
            updater = AdaptiveLossScalingUpdater(
                solver, loss, storage="float16", weight_decay=0.01, monitors=[Records()]
            )
            assert all(updater.update().updated for _ in range(3))
        found.append(snapshot())
    assert_equal(*found)


@pytest.mark.parametrize("missing", METHODS)
def test_a_method_that_is_missing_in_python_is_named(missing: str) -> None:
    loss = two_layers(data(4, 3))
    solver = written_in_python(*(name for name in METHODS if name != missing))(solver_of())
    with pytest.raises(TypeError, match=rf"nnabla solver; Wrapper must override {missing}\(\)"):
        AdaptiveLossScalingUpdater(solver, loss)


@pytest.mark.parametrize("missing", ["update", "get_parameters"])
def test_a_scaler_needs_no_method_but_these(missing: str) -> None:
    with pytest.raises(TypeError, match=rf"nnabla solver; Wrapper must override {missing}\(\)"):
        GradScaler(written_in_python(*{"update", "get_parameters"} - {missing})(solver_of()))


@pytest.mark.parametrize(
    "make",
    [
        lambda loss, solver: AdaptiveLossScaling(loss, parameters=solver.get_parameters),
        lambda loss, solver: FormatEmulation(loss, "float16", parameters=solver.get_parameters),
        lambda loss, solver: GradScaler(solver),
        lambda loss, solver: diagnose(DynamicLossScalingUpdater(solver, loss, lambda: None)),
        lambda loss, solver: save_checkpoint("never written", solver),
    ],
)
def test_parameters_that_nnabla_would_crash_for_are_asked_of_no_solver(make: Any) -> None:
    solver = written_in_python("update")(solver_of())
    with pytest.raises(TypeError, match=r"Wrapper must override get_parameters\(\), as it is"):
        make(two_layers(data(4, 3)), solver)


def test_a_solver_without_states_is_not_saved(tmp_path: Path) -> None:
    loss = two_layers(data(4, 3))
    updater = AdaptiveLossScalingUpdater(written_in_python(*METHODS)(solver_of()), loss, storage="float16")
    updater.update()
    with pytest.raises(TypeError, match="Wrapper must override get_states"):
        save_checkpoint(tmp_path / "checkpoint", updater)
    assert not [*tmp_path.iterdir()]
    assert diagnose(updater)
    # Of all solvers that are alive, one that nobody can ask is left out.
    made = written_in_python()(None)
    assert diagnose(two_layers(data(4, 3)), storage="float16")
    del made
