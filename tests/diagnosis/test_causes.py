# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Dict, List

import pytest

from nnabla_adaloss.core.formats import get_format
from nnabla_adaloss.diagnosis.causes import Cause, causes_of
from nnabla_adaloss.diagnosis.numbers import (
    FunctionNumbers,
    LayerNumbers,
    NetworkNumbers,
    ReadLeaf,
    Targets,
    Training,
    Values,
    WeightStep,
)

FLOAT16 = get_format("float16")
SOUND = FunctionNumbers(
    "fc", "Affine", "fc", FLOAT16, amax=1.0, gets_gradient=True, arriving=1.0, leaving=1.0
)


def layer(name: str, nonzero: int = 10, amax: float = 1e-3) -> LayerNumbers:
    return LayerNumbers(name, "Affine", amax, nonzero, 0.001, {}, FLOAT16)


def leaf(name: str, is_parameter: bool, nans: int, infinities: int) -> Dict[str, ReadLeaf]:
    return {name: ReadLeaf(name, is_parameter, nans, infinities)}


STARVED = [layer("fc", nonzero=0)]


def causes(*functions: FunctionNumbers, **network: Any) -> List[Cause]:
    layers = network.pop("layers", [layer("fc")])
    numbers = NetworkNumbers("float16", 4, 1.0, 1.0, {}, layers, functions)
    return causes_of(numbers._replace(**network))


def test_a_mask_of_minus_infinity_harms_nobody() -> None:
    mask = replace(SOUND, leaves=leaf("mask", False, 0, 5))
    assert causes(mask) == []
    (cause,) = causes(mask, loss=math.nan)
    assert (cause.kind, cause.fatal) == ("data_not_finite", True)


def test_activations_that_overflow_harm_only_where_they_matter() -> None:
    overflowed = replace(SOUND, overflowed=3, amax=1e6)
    assert causes(overflowed) == []
    (cause,) = causes(overflowed, stored_loss=math.inf)
    assert cause.kind == "activation_overflow"
    assert "reaches 1e+06, beyond float16, which ends at 65504" in cause.what
    (cause,) = causes(replace(overflowed, scores=True), stored_loss=math.inf)
    assert cause.kind == "attention_overflow"


def test_where_gradients_end() -> None:
    stops = replace(SOUND, stops_gradient=True)
    silent = replace(stops, name="fc/ReLU", type_name="ReLU", amax=0.0, inputs=(0,))
    (cause,) = causes(SOUND, silent, layers=STARVED)
    assert (cause.kind, cause.layer, cause.fatal) == ("dead_relu", "fc", True)
    (cause,) = causes(replace(SOUND, stuck_weights={"fc/W": True}), silent, layers=STARVED)
    assert (cause.kind, "fc/W" in cause.what) == ("zero_weights", True)
    (cause,) = causes(replace(stops, name="fc/Tanh", type_name="Tanh"), layers=STARVED)
    assert (cause.kind, "its Tanh" in cause.what) == ("no_gradient", True)
    # What reads nothing but zeros is not to blame for computing zeros.
    (cause,) = causes(replace(SOUND, amax=0.0), silent, layers=STARVED)
    assert cause.kind == "no_gradient"
    # Where other branches bring a gradient, it is nobody's fault.
    assert causes(stops) == []


def test_a_softmax_may_be_sure_in_the_loss() -> None:
    sure = replace(SOUND, type_name="Softmax", values=Values(saturated=1.0))
    (cause,) = causes(sure)
    assert cause.kind == "saturated"
    assert causes(replace(sure, loss_section=True)) == []


def test_a_dead_branch_beside_one_that_learns_may_wake_up() -> None:
    layers = [layer("stem", 5), layer("branch", 0)]
    stem = replace(SOUND, name="stem", layer="stem")
    branch = replace(SOUND, name="branch", layer="branch", inputs=(0,))
    relu = replace(branch, name="branch/ReLU", type_name="ReLU", amax=0.0, inputs=(1,))
    (cause,) = causes(stem, branch, relu, layers=layers)
    assert (cause.kind, cause.layer, cause.fatal) == ("dead_relu", "branch", False)
    (cause,) = causes(stem, branch, relu, layers=[layer("stem", 0), layer("branch", 0)])
    assert cause.fatal


def test_what_follows_from_another_cause_is_not_told() -> None:
    constant = replace(
        SOUND, name="bn", layer="bn", type_name="BatchNormalization", values=Values(constant=True, together=8)
    )
    stops = replace(SOUND, name="bn/ReLU", layer="bn", type_name="ReLU", stops_gradient=True, inputs=(0,))
    (cause,) = causes(constant, stops, layers=STARVED)
    assert (cause.kind, cause.layer) == ("constant_input", "bn")
    elsewhere = replace(stops, inputs=())
    assert [cause.kind for cause in causes(constant, elsewhere, layers=STARVED)] == [
        "constant_input",
        "no_gradient",
    ]


@pytest.mark.parametrize(
    ("type_name", "limit", "least", "largest", "whole", "said"),
    [
        ("SoftmaxCrossEntropy", 5, -1.0, 4.0, True, ""),  # -1 leaves a sample out
        ("SigmoidCrossEntropy", 2, -1.0, 1.0, True, "takes 0 or 1"),
        ("BinaryCrossEntropy", 0, 0.0, 0.5, False, ""),
        ("Embed", 5, -1.0, 4.0, True, "has 5 rows, 0 to 4"),
        ("OneHot", 5, 0.0, 5.0, True, "has 5 classes, 0 to 4"),
    ],
)
def test_labels_and_indices(
    type_name: str, limit: int, least: float, largest: float, whole: bool, said: str
) -> None:
    targets = Targets("the labels", limit, least, largest, 0, whole)
    found = causes(replace(SOUND, type_name=type_name, values=Values(targets=targets)))
    assert [said in cause.what for cause in found] == ([True] if said else [])


@pytest.mark.parametrize(("tiny", "eps"), [(2.0**-14, "2**-14"), (2.0**-6, "2**-6")])
def test_an_eps_is_one_that_the_storage_holds(tiny: float, eps: str) -> None:
    for type_name in ("Log", "Div2", "PowScalar"):
        (cause,) = causes(replace(SOUND, type_name=type_name, nonfinite=3), loss=math.nan, tiny=tiny)
        assert eps in cause.remedy


def test_the_learning_rate_is_told_by_weights_and_updates() -> None:
    def found(updates: int, weight: float, update: float) -> List[Cause]:
        return causes(SOUND, training=Training(10.0, updates, [WeightStep("fc", weight, 0.1, update)]))

    assert found(0, 0.1, 0.01) == []
    # One that starts small may be changed by more than its size.
    assert found(0, 0.001, 0.05) == []
    # Large from the beginning: that is the initialisation.
    assert found(0, 100.0, 0.05) == []
    for cause in (*found(0, 0.1, 0.2), *found(3, 100.0, 0.0)):
        assert (cause.kind, cause.layer, "rate of 10" in cause.what) == ("learning_rate", "fc", True)
    assert "after 3 updates" in found(3, 100.0, 0.0)[0].what


def test_an_update_hides_neither_overflow_nor_what_ends_a_gradient_before_the_first() -> None:
    def kinds(function: FunctionNumbers, updates: int, **network: Any) -> List[str]:
        training = Training(10.0, updates, [WeightStep("fc", 0.1, 0.1, 0.5)])
        return [cause.kind for cause in causes(function, training=training, **network)]

    saturated = replace(SOUND, type_name="Tanh", values=Values(saturated=1.0))
    assert kinds(saturated, 0) == ["saturated", "learning_rate"]
    assert kinds(saturated, 3) == ["learning_rate"]
    overflowed = replace(SOUND, overflowed=3, amax=1e6)
    assert kinds(overflowed, 3, stored_loss=math.inf) == ["activation_overflow", "learning_rate"]


def test_weights_that_are_spoiled_together_are_one_cause() -> None:
    functions = [
        replace(SOUND, name=f"fc{i}", layer=f"fc{i}", leaves=leaf(f"fc{i}/W", True, 4, 0)) for i in range(60)
    ]
    (cause,) = causes(*functions, training=Training(10.0, 3, []))
    assert (cause.layer, "59 other parameters" in cause.what) == ("fc0", True)
    assert "after 3 updates with a learning rate of 10" in cause.what
    assert "lower the learning rate" in cause.remedy


def test_a_dead_relu_is_told_beside_wrong_labels() -> None:
    silent = replace(SOUND, name="fc/ReLU", type_name="ReLU", amax=0.0, inputs=(0,))
    labels = Values(targets=Targets("the labels", 5, 1.0, 5.0, 0, True))
    loss = replace(SOUND, name="loss", type_name="SoftmaxCrossEntropy", values=labels)
    found = causes(SOUND, silent, loss, layers=STARVED)
    assert [cause.kind for cause in found] == ["wrong_labels", "dead_relu"]


def test_what_a_too_large_update_does_to_gradients_is_not_told() -> None:
    loud = replace(SOUND, name="fc2", layer="fc2", leaving=200.0)
    (cause,) = causes(loud, training=Training(10.0, 3, [WeightStep("fc", 100.0, 0.1, 0.0)]))
    assert cause.kind == "learning_rate"


def test_a_layer_that_is_named_for_another_cause_is_named_once() -> None:
    (cause,) = causes(replace(SOUND, leaving=200.0, breaks_gradient=True))
    assert cause.kind == "backward_not_finite"


def test_what_no_scale_helps_comes_first() -> None:
    broken = replace(SOUND, name="fc2", layer="fc2", breaks_gradient=True)
    found = causes(replace(SOUND, leaving=200.0), broken)
    assert [cause.fatal for cause in found] == [True, False]
