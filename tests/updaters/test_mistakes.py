# SPDX-License-Identifier: Apache-2.0
"""Common mistakes are answered by one sentence that says what to do, before anything is changed."""

from __future__ import annotations

import functools
import inspect
import pickle
from dataclasses import replace
from typing import Any, Callable, List
from unittest.mock import Mock

import nnabla as nn
import nnabla.solvers as S
import numpy as np
import pytest
from nnabla.monitor import Monitor, MonitorSeries

from nnabla_adaloss import (
    AdaLossConfig,
    AdaptiveLossScalingUpdater,
    FixedLossScalingUpdater,
    FormatEmulation,
    GradScaler,
    LossScaler,
    diagnose,
)
from tests.worlds.networks import two_layers
from tests.worlds.trainings import solver_of
from tests.worlds.values import data

pytestmark = pytest.mark.filterwarnings("ignore:nothing is stored in half precision")

UPDATERS = [AdaptiveLossScalingUpdater, FixedLossScalingUpdater]
CONFIG = AdaLossConfig()


def refused(told: str, make: Callable[..., Any], *args: Any, **options: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=told) as error:
        make(*args, **options)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 200


@pytest.fixture
def loss() -> nn.Variable:
    return two_layers(data(4, 3))


@pytest.mark.parametrize("storage", [None, "float16"])
@pytest.mark.parametrize("make", UPDATERS)
def test_of_an_updater(make: Any, storage: Any, loss: nn.Variable, tmp_path: Any) -> None:
    made, before = functools.partial(make, storage=storage), loss.parent
    solver, series = solver_of(), MonitorSeries("loss", Monitor(str(tmp_path)))
    refused("^solver .*loss comes after the solver", made, loss, solver, lambda: None)
    refused("^solver .*loss comes after the solver", made, FormatEmulation(loss), solver)
    refused(r"^solver .*Adam makes one: call it, as in Adam\(1e-3\)", made, S.Adam, loss)
    refused(r"^data_feeder .*NoneType: give feed, not feed\(\)", made, solver, loss, None)
    for losses in ([loss, loss], (loss,)):
        refused("^loss .*add the losses, or train on each by itself", made, solver, losses)
    refused("^scale must be a number.*config=", made, solver, loss, lambda: None, CONFIG)
    refused("acum_grad; did you mean accum_grad=", made, solver, loss, acum_grad=2)
    refused("MonitorSeries.*to_monitor_series", made, solver, loss, monitors=[series])
    refused("^storage=.*float64.*choose one of float16", make, solver, loss, storage=np.float64)
    assert loss.parent == before
    assert made(solver, loss, config=CONFIG) if make is AdaptiveLossScalingUpdater else True


def test_of_other_scalers_and_of_the_config(loss: nn.Variable) -> None:
    solver = solver_of()
    refused(r"^solvers\[1\] .*forward\(loss\)", GradScaler, solver, loss)
    refused(r"^solvers\[0\] .*Adam makes one", GradScaler, S.Adam)
    refused(r"^solvers\[0\] .*GradScaler\(\*solvers\)", GradScaler, [solver])
    refused(r"^solvers\[1\] .*config=", GradScaler, solver, CONFIG)
    refused("storge; did you mean storage=", GradScaler, solver, storge="float16")
    refused("^loss .*add the losses", GradScaler(solver).forward, [loss, loss])
    for given in (solver, loss, CONFIG):
        refused("^initial_scale must be a number; GradScaler", LossScaler, given)
    refused("init_scale; did you mean initial_scale=", LossScaler, init_scale=8.0)
    refused("measure_evry; did you mean measure_every=", AdaLossConfig, measure_evry=2)
    refused("measure_evry; did you mean measure_every=", replace, CONFIG, measure_evry=2)
    refused("config; AdaptiveLossScalingUpdater", FixedLossScalingUpdater, solver, loss, config=CONFIG)


@pytest.mark.parametrize(
    "make", [AdaLossConfig, AdaptiveLossScalingUpdater, FixedLossScalingUpdater, GradScaler, LossScaler]
)
def test_the_signature_stays_to_be_seen(make: Any) -> None:
    names = [*inspect.signature(make).parameters]
    assert len(names) > 5
    assert not {"args", "kwargs"} & {*names}
    assert pickle.loads(pickle.dumps(CONFIG)) == CONFIG


class Feeder:
    """One that keeps where it is, as a method or by itself."""

    def __call__(self) -> None:
        pass

    def feed(self, batch: int) -> None:
        pass

    def step(self, solver: Any) -> None:
        pass


def feed(loader: List[int], *, batch: int) -> None:
    pass


def hands_on(function: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(function)
    def called(*args: Any) -> None:
        function([], *args, batch=3)

    return called


@pytest.mark.parametrize("make", UPDATERS)
def test_a_feeder_that_needs_arguments(make: Any, loss: nn.Variable) -> None:
    solver = solver_of()
    for given in (lambda x: None, feed, Feeder().feed):
        refused(
            r"^data_feeder must be callable without arguments, unlike .*\(.*\)", make, solver, loss, given
        )
    updater = make(solver, loss)
    refused("^data_feeder", setattr, updater, "data_feeder", feed)
    # C, a class, partials, and what hands its arguments on.
    right = [
        iter([]).__next__,
        Feeder,
        Feeder(),
        functools.partial(feed, [], batch=3),
        functools.partial(feed),
        hands_on(feed),
        lambda *args: None,
        lambda x=3: None,
        Mock(),
        dict,
        max,
    ]
    for given in right:
        updater.data_feeder = given
        assert updater.data_feeder is given


def test_a_hook_of_gradients_that_does_not_take_the_solver(loss: nn.Variable) -> None:
    updater = AdaptiveLossScalingUpdater(solver_of(), loss)
    for given in (lambda: None, lambda solver, norm: None, Feeder(), Feeder().feed.__func__):
        refused(
            "^on_gradients must be callable with the solver, unlike",
            AdaptiveLossScalingUpdater,
            updater.solver,
            loss,
            on_gradients=given,
        )
    for given in (
        None,
        print,
        Feeder().step,
        lambda solver, norm=1.0: None,
        functools.partial(feed, batch=1),
    ):
        updater.on_gradients = given


@pytest.mark.parametrize("given", [np.float16, np.dtype("float16"), np.half])
def test_a_dtype_is_a_storage(given: Any, loss: nn.Variable) -> None:
    solver = solver_of(S.Sgd(0.0))
    for make in UPDATERS:
        updater = make(solver, loss, storage=given)
        assert updater.update().updated
    assert str(updater.loss.precisions) == "float16"
    GradScaler(solver, storage=given).forward(loss)
    assert FormatEmulation(loss, {"*": given}).precisions.only.forward.name == "float16"  # type: ignore[union-attr]
    assert AdaLossConfig(dtype=given) == AdaLossConfig(dtype="float16")
    assert str(FormatEmulation(loss, np.float32).precisions) == "float32"
    assert diagnose(loss, given).verdict.line == diagnose(loss, "float16").verdict.line
