# SPDX-License-Identifier: Apache-2.0
"""Every argument of what the package offers: one of another type is refused by its name, when it is given."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any, Callable, Dict, List, Tuple

import nnabla as nn
import nnabla.functions as F
import numpy as np
import pytest

import nnabla_adaloss as na
from nnabla_adaloss.core import methods
from nnabla_adaloss.core.formats import FLOAT8_E4M3
from nnabla_adaloss.kernels import CpuKernels
from tests.worlds.networks import two_layers
from tests.worlds.trainings import solver_of, updater_of
from tests.worlds.values import HALF, data

Make = Callable[..., Any]
Base = Callable[[], Dict[str, Any]]

G, W = np.array([[1e-7, -1e-7]]), np.ones((2, 2))


def loss() -> nn.Variable:
    return two_layers(data(4, 3))


def trained() -> Dict[str, Any]:
    return {"loss": loss(), "solver": solver_of(), "data_feeder": lambda: None}


def scaler(*args: Any, **options: Any) -> na.GradScaler:
    return na.GradScaler(trained()["solver"], *args, **options)


def x() -> nn.Variable:
    return nn.Variable((2, 3), need_grad=True)


def layer() -> Dict[str, Any]:
    tracker = na.ScaleTracker()
    w = na.unscale(nn.Variable((3, 4), need_grad=True), tracker)
    return {"x": F.affine(x(), w), "w": w, "config": tracker}


def config() -> Dict[str, Any]:
    return {"g": G, "W": W, "config": na.AdaLossConfig(), "fan_in": 2}


# What is called, and arguments that are right.
CALLS: Dict[str, Tuple[Make, Base]] = {
    "AdaptiveLossScalingUpdater": (na.AdaptiveLossScalingUpdater, trained),
    "FixedLossScalingUpdater": (na.FixedLossScalingUpdater, trained),
    "AdaptiveLossScaling": (na.AdaptiveLossScaling, lambda: {"loss": loss()}),
    "FormatEmulation": (na.FormatEmulation, lambda: {"loss": loss()}),
    "GradScaler": (scaler, dict),
    "LossScaler": (na.LossScaler, dict),
    "AdaLossConfig": (na.AdaLossConfig, dict),
    "HistoryPolicy": (na.HistoryPolicy, dict),
    **{made.__name__: (made, dict) for made in (*methods.METHODS.values(), methods.LognormalRange)},
    "Precision": (na.Precision, dict),
    "Format": (
        na.Format,
        lambda: {field.name: getattr(FLOAT8_E4M3, field.name) for field in fields(na.Format)},
    ),
    "Format.ieee": (na.Format.ieee, lambda: {"name": "e5m6", "exponent_bits": 5, "mantissa_bits": 6}),
    "NNablaAdaLoss": (na.NNablaAdaLoss, lambda: {"config": na.AdaLossConfig(), "kernels": CpuKernels()}),
    "diagnose": (na.diagnose, lambda: {"loss_or_updater": loss()}),
    "profile": (na.profile, lambda: {"updater": updater_of(loss())}),
    "SanityChecker": (na.SanityChecker, lambda: {"updater": updater_of(loss())}),
    "Recorder": (na.Recorder, dict),
    "LogMonitor": (na.LogMonitor, dict),
    "NanDump": (na.NanDump, lambda: {"path": "arrays"}),
    "Recording": (na.Recording, dict),
    "ScaleTracker": (na.ScaleTracker, dict),
    "loss_scaling": (na.loss_scaling, lambda: {"x": x(), "scale": 2.0}),
    "cast_loss_scaling": (na.cast_loss_scaling, lambda: {"x": x(), "tracker": na.ScaleTracker()}),
    "branch": (na.branch, lambda: {"x": x(), "n": 2, "tracker": na.ScaleTracker()}),
    "unscale": (na.unscale, lambda: {"w": x(), "scale": na.ScaleTracker()}),
    "round_to_format": (na.round_to_format, lambda: {"x": x(), "storage": "float16"}),
    "adaptive_loss_scaling": (na.adaptive_loss_scaling, layer),
    "get_loss_scale": (na.get_loss_scale, config),
    "get_loss_scale_by_abs_range": (na.get_loss_scale_by_abs_range, config),
    "get_loss_scale_by_approx_range": (na.get_loss_scale_by_approx_range, config),
    "get_loss_scale_by_element_wise_range": (na.get_loss_scale_by_element_wise_range, config),
    "get_power_of_two_scale": (na.get_power_of_two_scale, lambda: {"scale": 2.0}),
    "bound_loss_scale_by_heuristics": (
        na.bound_loss_scale_by_heuristics,
        lambda: {"scale": 2.0, "config": na.AdaLossConfig()},
    ),
}
# What makes the passes over memory, and the rows of a recording, which are made by a `Recorder`.
NOT_CHECKED = {("NNablaAdaLoss", "kernels"), ("Recording", "rows")}


def arguments() -> List[Tuple[str, str]]:
    named = {
        call: inspect.signature(na.GradScaler if make is scaler else make).parameters.values()
        for call, (make, _) in CALLS.items()
    }
    found = [(call, p.name) for call, own in named.items() for p in own if p.kind is not p.VAR_POSITIONAL]
    return [argument for argument in found if argument not in NOT_CHECKED]


@pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")
@pytest.mark.parametrize(("call", "name"), arguments())
def test_an_object_of_no_use_is_refused_by_the_name_of_the_argument(call: str, name: str) -> None:
    make, base = CALLS[call]
    with pytest.raises((TypeError, ValueError), match=name):
        make(**{**base(), name: object()})


@pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")
@pytest.mark.parametrize("call", sorted(CALLS.keys() - {"profile", "diagnose"}))
def test_the_others_are_right(call: str) -> None:
    make, base = CALLS[call]
    make(**base())


@pytest.mark.parametrize(
    ("call", "name", "value"),
    [
        ("FixedLossScalingUpdater", "drop_overflow_update", "no"),
        ("FixedLossScalingUpdater", "clear_buffer", "no"),
        ("FixedLossScalingUpdater", "weight_decay", -1),
        ("AdaptiveLossScalingUpdater", "global_scale", np.ones(2)),
        ("AdaptiveLossScalingUpdater", "grads", np.ones(2)),
        ("GradScaler", "storage", "float17"),
        ("GradScaler", "non_homogeneous", "ReLU"),
        ("AdaptiveLossScaling", "non_homogeneous", "ReLU"),
        ("LossScaler", "initial_scale", None),
        ("branch", "n", 0),
        ("Recording", "limit", -1),
        ("Recorder", "layers", ["conv", 3]),
        ("Recorder", "tensorboard", 3),
        ("Format.ieee", "mantissa_bits", "many"),
        ("get_loss_scale", "g", None),
        ("get_loss_scale", "g", "many"),
        ("get_power_of_two_scale", "scale", True),
    ],
)
def test_a_value_of_no_use_is_refused_by_the_name_of_the_argument(call: str, name: str, value: Any) -> None:
    make, base = CALLS[call]
    with pytest.raises((TypeError, ValueError), match=name):
        make(**{**base(), name: value})


@pytest.mark.parametrize("make", [na.AdaptiveLossScaling, na.FormatEmulation])
def test_arguments_of_backward_are_checked(make: Any) -> None:
    wrapped = make(loss())
    wrapped.forward()
    for value in ("much", {}, object()):
        with pytest.raises(TypeError, match="^grad must be an array of numbers"):
            wrapped.backward(grad=value)
    if make is na.AdaptiveLossScaling:
        with pytest.raises(TypeError, match="^iteration=2.5 must be an integer"):
            wrapped.backward(iteration=2.5)


@pytest.mark.parametrize(
    ("call", "name"),
    [("forward", "clear_buffer"), ("forward", "clear_no_need_grad"), ("backward", "clear_buffer")],
)
def test_clear_buffer_of_a_grad_scaler_must_be_a_boolean(call: str, name: str) -> None:
    work = trained()
    made = na.GradScaler(work["solver"])
    made.forward(work["loss"])
    with pytest.raises(TypeError, match=f"^{name}='no' must be True or False"):
        getattr(made, call)(work["loss"], **{name: "no"})


def test_an_attribute_of_a_fixed_updater_is_checked_as_its_argument() -> None:
    updater = na.FixedLossScalingUpdater(**trained())
    with pytest.raises(TypeError, match="drop_overflow_update='no' must be True or False"):
        updater.drop_overflow_update = "no"
    assert updater.drop_overflow_update is True


@pytest.mark.parametrize("call", ["AdaptiveLossScalingUpdater", "FixedLossScalingUpdater"])
def test_a_graph_stays_as_it_is_where_an_argument_is_refused(call: str) -> None:
    """In a half context, where functions at the loss are moved to float otherwise."""
    make = CALLS[call][0]
    with nn.context_scope(HALF):
        work = trained()
        work["loss"] = F.mul_scalar(work["loss"], 1e-8)
    for name in inspect.signature(make).parameters.keys() - {"solver", "loss"}:
        with pytest.raises((TypeError, ValueError), match=name):
            make(**{**work, name: object()})
        assert work["loss"].parent.context.backend[0] == "cpu:half", name
    make(**work)
    assert work["loss"].parent.context.backend[0] == "cpu:float"
