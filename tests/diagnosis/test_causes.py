# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from typing import Any, List

from nnabla_adaloss.diagnosis.causes import Cause, Kind, causes_of
from nnabla_adaloss.diagnosis.numbers import FunctionNumbers, LayerNumbers, NetworkNumbers, ReadLeaf

SOUND = FunctionNumbers("fc", "Affine", "fc", True, False, False, (), 1.0, 0, 0, "", 1e-3, 1.0, False, False)


def causes(*functions: FunctionNumbers, **network: Any) -> List[Cause]:
    layers = network.pop("layers", [LayerNumbers("fc", "Affine", 1e-3, 10, 0.001, {})])
    numbers = NetworkNumbers("float16", 65504.0, 4, 1.0, 1.0, {}, layers, functions)
    return causes_of(numbers._replace(**network))


def test_nothing_is_wrong() -> None:
    assert causes(SOUND) == []


def test_a_mask_of_minus_infinity_harms_nobody() -> None:
    mask = SOUND._replace(leaves=(ReadLeaf("mask", False, 0, 5),))
    assert causes(mask) == []
    (cause,) = causes(mask, loss=math.nan)
    assert (cause.kind, cause.fatal) == (Kind.DATA_NOT_FINITE, True)


def test_activations_that_overflow_harm_only_where_they_matter() -> None:
    overflowed = SOUND._replace(overflowed=3, amax=1e6)
    assert causes(overflowed) == []
    (cause,) = causes(overflowed, stored_loss=math.inf)
    assert cause.kind is Kind.ACTIVATION_OVERFLOW
    assert "reaches 1e+06, beyond float16, which ends at 65504" in cause.what
    (cause,) = causes(overflowed._replace(scores=True), stored_loss=math.inf)
    assert cause.kind is Kind.ATTENTION_OVERFLOW


def test_data_beyond_the_storage() -> None:
    (cause,) = causes(SOUND._replace(beyond="the input of shape (2, 3)"), stored_loss=math.inf)
    assert cause.kind is Kind.BEYOND_STORAGE
    assert str(cause).startswith("fc: the input of shape (2, 3) holds numbers beyond float16")


def test_a_gradient_that_breaks() -> None:
    root = SOUND._replace(name="fc/PowScalar", type_name="PowScalar", is_layer=False, breaks_gradient=True)
    (cause,) = causes(root)
    assert (cause.kind, cause.layer) == (Kind.BACKWARD_NOT_FINITE, "fc")
    assert "before the root" in cause.remedy


def test_where_gradients_end() -> None:
    starved = [LayerNumbers("fc", "Affine", 0.0, 0, 0.0, {})]
    stops = SOUND._replace(stops_gradient=True)
    silent = stops._replace(name="fc/ReLU", type_name="ReLU", is_layer=False, amax=0.0, inputs=(0,))
    (cause,) = causes(SOUND, silent, layers=starved)
    assert (cause.kind, cause.layer, cause.fatal) == (Kind.DEAD_RELU, "fc", True)
    (cause,) = causes(SOUND._replace(stuck_weights=("fc/W",)), silent, layers=starved)
    assert (cause.kind, "fc/W" in cause.what) == (Kind.ZERO_WEIGHTS, True)
    (cause,) = causes(stops._replace(name="fc/Tanh", type_name="Tanh", is_layer=False), layers=starved)
    assert (cause.kind, "its Tanh" in cause.what) == (Kind.NO_GRADIENT, True)
    # Where other branches bring a gradient, it is nobody's fault.
    assert causes(stops) == []


def test_layers_that_change_gradients_by_themselves() -> None:
    loud, quiet = SOUND._replace(growth=200.0), SOUND._replace(growth=1e-4)
    weight = SOUND._replace(type_name="MulScalar", is_layer=False, loss_section=True, growth=1e-6)
    found = causes(loud, quiet, weight, SOUND._replace(loss_section=True, growth=1e4))
    assert [cause.kind for cause in found] == [Kind.EXPLODING, Kind.SHRINKING, Kind.SMALL_LOSS]
    assert not any(cause.fatal for cause in found)


def test_layers_that_change_them_together() -> None:
    layers = [LayerNumbers(f"fc{i}", "Affine", 2.0 ** (8 * i), 10, 0.001, {}) for i in range(4)]
    (cause,) = causes(SOUND, layers=layers)
    assert (cause.kind, cause.layer) == (Kind.SPREAD, "fc0")
    assert "vanish" in cause.what
    (cause,) = causes(SOUND, layers=layers[::-1])
    assert (cause.layer, "explode" in cause.what) == ("fc3", True)


def test_what_no_scale_helps_comes_first() -> None:
    broken = SOUND._replace(name="fc2", layer="fc2", breaks_gradient=True)
    found = causes(SOUND._replace(growth=200.0), broken)
    assert [cause.fatal for cause in found] == [True, False]
