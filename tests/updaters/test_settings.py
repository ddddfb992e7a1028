# SPDX-License-Identifier: Apache-2.0
"""What an updater is made with can be assigned later, checked and obeyed, or is refused."""

from __future__ import annotations

import inspect
import math
from typing import Any, Dict, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest
from nnabla.experimental.mixed_precision_training import DynamicLossScalingUpdater

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScalingUpdater
from nnabla_adaloss.updaters.settings import always

ARGUMENTS = [
    name for name in inspect.signature(AdaptiveLossScalingUpdater.__init__).parameters if name != "self"
]
SEARCHING: Dict[str, Any] = {"global_scale": "dynamic", "on_overflow": "next"}


def training() -> Tuple[Any, nn.Variable]:
    nn.clear_parameters()
    x = nn.Variable.from_numpy_array(np.random.RandomState(0).randn(4, 3).astype(np.float32))
    h = F.tanh(PF.affine(x, 5, name="a", rng=np.random.RandomState(1)))
    loss = F.mean(PF.affine(h, 2, name="b", rng=np.random.RandomState(2)) ** 2)
    solver = S.Sgd(0.1)
    solver.set_parameters(nn.get_parameters())
    return solver, loss


def updater_with(**options: Any) -> AdaptiveLossScalingUpdater:
    solver, loss = training()
    return AdaptiveLossScalingUpdater(solver, loss, storage="float16", **options)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_no_argument_is_a_plain_attribute(name: str) -> None:
    """What was assigned to a plain one could be ignored, and nobody would know."""
    assert inspect.isdatadescriptor(inspect.getattr_static(AdaptiveLossScalingUpdater, name))
    getattr(updater_with(), name)


def test_all_attributes_of_nnablas_updater_are_among_them() -> None:
    solver, loss = training()
    public = {name for name in vars(DynamicLossScalingUpdater(solver, loss)) if not name.startswith("_")}
    assert public <= set(ARGUMENTS)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_object_of_no_use_is_refused_with_the_name_of_the_argument(name: str) -> None:
    updater = updater_with(**SEARCHING)
    before = getattr(updater, name)
    with pytest.raises((TypeError, ValueError, AttributeError), match=name):
        setattr(updater, name, object())
    assert getattr(updater, name) is before
    assert updater.update().updated


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("scaling_factor", 0.5),
        ("N", -1),
        ("N", math.nan),
        ("min_scale", 2.0**70),
        ("max_scale", 0.0),
        ("hysteresis", 0),
        ("accum_grad", 0),
        ("max_retries", -1),
        ("check_every", -1),
        ("scale", math.inf),
        ("on_scale_floor", "ignore"),
        ("on_scale_floor", np.array(["skip", "skip"])),
        ("clear_buffer", "no"),
        ("average", "yes"),
        ("average", 1),
        ("weight_decay", -1),
        ("weight_decay", math.nan),
        ("weight_decay", math.inf),
        ("weight_decay", True),
    ],
)
def test_values_are_checked_as_the_constructor_checks_them(name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError)) as made:
        updater_with(**{**SEARCHING, name: value})
    updater = updater_with(**SEARCHING)
    with pytest.raises((TypeError, ValueError)) as assigned:
        setattr(updater, name, value)
    assert str(assigned.value) == str(made.value)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in ARGUMENTS
        if getattr(inspect.getattr_static(AdaptiveLossScalingUpdater, name), "refuses", None) is always
    ],
)
def test_what_was_built_in_is_refused(name: str) -> None:
    with pytest.raises(AttributeError, match=f"{name} cannot be changed"):
        setattr(updater_with(), name, None)


def test_the_scale_grows_as_nnablas_does_when_its_settings_change() -> None:
    found = []
    for make in (DynamicLossScalingUpdater, AdaptiveLossScalingUpdater):
        solver, loss = training()
        options = {} if make is DynamicLossScalingUpdater else SEARCHING
        updater = make(solver, loss, lambda: None, **options)
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
    updater = updater_with(**SEARCHING, hysteresis=4)
    updater.hysteresis = 2
    assert updater.scale_state.hysteresis_left == 2
    updater.load_state_dict(updater.state_dict())


def test_the_floor_of_measured_scales_was_built_in() -> None:
    updater = updater_with()
    with pytest.raises(AttributeError, match="min_scale cannot be changed"):
        updater.min_scale = 1.0
    searching = updater_with(**SEARCHING)
    searching.min_scale = 1.0
    assert searching.policy.min_scale == 1.0


def test_others_are_obeyed() -> None:
    calls = []
    updater = updater_with(config=AdaLossConfig(measure_every=1))
    updater.data_feeder = lambda: calls.append("fed")
    updater.on_gradients = lambda solver: calls.append("gradients")
    updater.accum_grad = 3
    updater.clear_buffer = False
    updater.update()
    assert calls[-4:] == ["fed"] * 3 + ["gradients"]
    other = S.Sgd(0.0)
    other.set_parameters(nn.get_parameters())
    updater.solver = other
    before = {name: v.d.copy() for name, v in nn.get_parameters().items()}
    updater.update()
    for name, v in nn.get_parameters().items():
        np.testing.assert_array_equal(v.d, before[name])
