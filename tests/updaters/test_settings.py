# SPDX-License-Identifier: Apache-2.0
"""What an updater is made with is checked; it can be assigned later, checked and obeyed, or is refused.

Common mistakes are answered by one sentence that says what to do, before anything is changed.
"""

from __future__ import annotations

import functools
import inspect
import math
import pickle
import re
from dataclasses import replace
from typing import Any, Callable, Dict, List
from unittest.mock import Mock

import nnabla as nn
import nnabla.solvers as S
import numpy as np
import pytest
from nnabla.experimental.mixed_precision_training import DynamicLossScalingUpdater
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
from nnabla_adaloss.updaters.settings import Setting
from tests.worlds.networks import two_layers
from tests.worlds.ranks import Pair
from tests.worlds.trainings import AS_THE_BASELINE, solver_of, updater_of
from tests.worlds.values import assert_equal, data, snapshot

ARGUMENTS = [*inspect.signature(AdaptiveLossScalingUpdater.__init__).parameters][1:]
TABLE = {name: row for name, row in vars(AdaptiveLossScalingUpdater).items() if isinstance(row, Setting)}
BUILT_IN = [name for name in ARGUMENTS if name in TABLE and TABLE[name].fixed is True]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_is_in_the_docstring_and_the_table(name: str) -> None:
    assert re.search(rf"^    +{name}: ", str(AdaptiveLossScalingUpdater.__doc__), re.MULTILINE)
    # Assigning these two changes the engine.
    assert name in TABLE or name in {"loss", "scale"}
    assert {*TABLE} - {*ARGUMENTS} == {"history"}


# Arguments that a state does not hold: objects, arguments that change no scale and no update, and those that
# a training may change when it is resumed, as it may change its learning rate.
NOT_SAVED = {
    "solver", "data_feeder", "comm", "grads", "monitors", "function_pre_hook", "function_post_hook",
    "on_gradients", "clear_buffer", "check_every", "float_tail",
    "weight_decay", "storage", "max_retries", "on_nonfinite_loss", "on_nonfinite_forward", "on_scale_floor",
    "history",  # part of `global_scale`
}  # fmt: skip


def test_whether_a_state_holds_an_argument_is_decided() -> None:
    assert {name for name, row in TABLE.items() if not row.saved} == NOT_SAVED


def updater_with(**options: Any) -> AdaptiveLossScalingUpdater:
    nn.clear_parameters()
    return updater_of(two_layers(data(4, 3)), **options)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_object_of_no_use_is_refused_with_the_name_of_the_argument(name: str) -> None:
    """What was assigned to a plain attribute could be ignored, and nobody would know."""
    assert inspect.isdatadescriptor(inspect.getattr_static(AdaptiveLossScalingUpdater, name))
    updater = updater_with(**AS_THE_BASELINE)
    before = getattr(updater, name)
    with pytest.raises((TypeError, ValueError, AttributeError), match=name):
        setattr(updater, name, object())
    assert getattr(updater, name) is before
    assert updater.update().updated


def test_all_attributes_of_nnablas_updater_are_among_them() -> None:
    solver, loss = updater_with().solver, two_layers(data(4, 3))
    public = {name for name in vars(DynamicLossScalingUpdater(solver, loss)) if not name.startswith("_")}
    assert public <= set(ARGUMENTS)
    given = {"scaling_factor": 4.0, "N": 7, "accum_grad": 2, "weight_decay": 0.5, "comm": Pair(size=1)}
    updater = updater_with(**given, **AS_THE_BASELINE)
    assert {name: getattr(updater, name) for name in given} == given


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("scaling_factor", 0.5, "scaling_factor"),
        ("N", -1, "N="),
        ("min_scale", 2.0**70, "min_scale"),
        ("max_scale", 0.0, "max_scale"),
        ("hysteresis", 0, "hysteresis"),
        ("accum_grad", 0, "accum_grad=0 must be 1 or more"),
        ("accum_grad", 1.5, "accum_grad=1.5 must be an integer"),
        ("check_every", -1, "check_every=-1"),
        ("scale", -1.0, "scale=-1.0"),
        ("scale", math.inf, "scale=inf"),
        ("scale", 5e-324, "scale=5e-324 is too small to unscale"),
        ("min_scale", 5e-324, "min_scale=5e-324 is too small to unscale"),
        ("on_scale_floor", "ignore", "on_scale_floor='ignore' must be one of 'raise', 'skip', 'warn'"),
        ("on_scale_floor", np.array(["skip", "skip"]), "on_scale_floor"),
        ("on_nonfinite_loss", "ignore", "on_nonfinite_loss"),
        ("on_nonfinite_forward", "ignore", "on_nonfinite_forward"),
        ("weight_decay", -1, "weight_decay=-1 must be a finite number, 0 or more"),
        ("weight_decay", math.nan, "weight_decay=nan"),
        ("solver", 3, r"solver must be an nnabla solver; int has no zero_grad\(\)"),
        ("on_overflow", "skip", "on_overflow"),
        ("storage", "float17", "storage.*float16"),
        ("comm", object(), "comm must be a communicator with all_reduce"),
        ("grads", [nn.NdArray(()), nn.Variable(())], r"grads\[1\] must be an NdArray, .* got Variable"),
        ("grads", [nn.NdArray((1,))], "grads are exchanged through comm"),
        (
            "global_scale",
            "fast",
            "global_scale='fast' must be one of 'history', 'dynamic', or a HistoryPolicy",
        ),
        ("function_post_hook", (print,), "function_post_hook must be a callable"),
        ("function_pre_hook", (print, 3), "function_pre_hook must be a callable"),
    ],
)
def test_values_are_checked_by_the_constructor_and_when_they_are_assigned(
    name: str, value: Any, told: str
) -> None:
    updater = updater_with(**AS_THE_BASELINE)
    parent = updater.loss.parent
    with pytest.raises((TypeError, ValueError), match=f"^{told}") as made:
        AdaptiveLossScalingUpdater(
            **{"solver": updater.solver, "loss": updater.loss, **AS_THE_BASELINE, name: value}
        )
    assert updater.loss.parent == parent
    if name not in BUILT_IN:
        with pytest.raises((TypeError, ValueError)) as assigned:
            setattr(updater, name, value)
        assert str(assigned.value) == str(made.value)


@pytest.mark.parametrize("name", BUILT_IN)
def test_builtin_types_are_refused(name: str) -> None:
    with pytest.raises(AttributeError, match=f"{name} cannot be changed"):
        setattr(updater_with(), name, None)


def test_the_scale_grows_as_nnablas_does_when_its_settings_change() -> None:
    found = []
    for make, options in (
        (DynamicLossScalingUpdater, {}),
        (AdaptiveLossScalingUpdater, {"storage": "float16", **AS_THE_BASELINE}),
    ):
        nn.clear_parameters()
        loss = two_layers(data(4, 3))
        updater = make(solver_of(), loss, lambda: None, **options)
        scales = []
        for index in range(20):
            if index == 3:
                updater.N = 2
            if index == 10:
                updater.scaling_factor = 4.0
            if index == 15:
                updater.N, updater.scale = 1, 32.0
            updater.update()
            scales.append(updater.scale)
        found.append(scales)
    assert found[0] == found[1]
    assert len(set(found[0])) > 4


def test_hysteresis_that_is_lowered_counts_no_further_than_it_goes() -> None:
    updater = updater_with(**AS_THE_BASELINE, hysteresis=4)
    updater.hysteresis = 2
    assert updater.scale_state.hysteresis_left == 2
    updater.load_state_dict(updater.state_dict())
    # Overflows that were counted stay counted, whatever is assigned.
    updater.N, updater.hysteresis = 100, 4
    assert updater.scale_state.hysteresis_left == 2


def test_the_floor_of_measured_scales_was_built_in() -> None:
    with pytest.raises(AttributeError, match="min_scale cannot be changed"):
        updater_with().min_scale = 1.0
    searching = updater_with(**AS_THE_BASELINE)
    searching.min_scale = 1.0
    assert searching.min_scale == 1.0


def test_a_solver_whose_gradients_are_exchanged_stays() -> None:
    updater = updater_with(comm=Pair(size=1))
    updater.solver = updater.solver
    with pytest.raises(AttributeError, match="solver cannot be changed"):
        updater.solver = S.Sgd(0.1)


def test_others_are_obeyed() -> None:
    calls = []
    updater = updater_with(config=AdaLossConfig(measure_every=1))
    updater.data_feeder = lambda: calls.append("fed")
    updater.on_gradients = lambda solver: calls.append("gradients")
    updater.accum_grad = 3
    updater.clear_buffer = False
    updater.update()
    assert calls[-4:] == ["fed"] * 3 + ["gradients"]
    updater.solver = solver_of(S.Sgd(0.0))
    before: Dict[str, Any] = snapshot()
    updater.update()
    assert_equal(snapshot(), before)


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
def test_refused_arguments_of_an_updater(make: Any, storage: Any, loss: nn.Variable, tmp_path: Any) -> None:
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


def test_refused_arguments_of_other_scalers_and_of_the_config(loss: nn.Variable) -> None:
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


@pytest.mark.parametrize("given", [np.float16, np.dtype("float16"), np.half])
def test_a_dtype_is_a_storage(given: Any, loss: nn.Variable) -> None:
    solver = solver_of(S.Sgd(0.0))
    for make in UPDATERS:
        updater = make(solver, loss, storage=given)
        assert updater.update().updated
        assert str(updater.scaling.loss.precisions) == "float16"
    GradScaler(solver, storage=given).forward(loss)
    assert FormatEmulation(loss, {"*": given}).precisions.common.forward.name == "float16"  # type: ignore[union-attr]
    assert AdaLossConfig(dtype=given) == AdaLossConfig(dtype="float16")
    assert str(FormatEmulation(loss, np.float32).precisions) == "float32"
    assert diagnose(loss, given).verdict.line == diagnose(loss, "float16").verdict.line


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
