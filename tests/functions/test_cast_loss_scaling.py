# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any, Tuple

import nnabla as nn
import nnabla.functions as F
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnabla_adaloss import AdaLossConfig, get_loss_scale_by_approx_range, get_power_of_two_scale
from nnabla_adaloss.functions import ScaleTracker, cast_loss_scaling, loss_scaling, unscale
from tests.functions.graphs import bits, gradients, variable


def scaled(values: np.ndarray, tracker: ScaleTracker, **kwargs: Any) -> Tuple[nn.Variable, nn.Variable]:
    """A parameter whose gradient is `values`, cast on its way, and the loss."""
    w = variable(np.ones_like(values))
    x = cast_loss_scaling(unscale(w, tracker), tracker, **kwargs)
    return w, loss_scaling(F.sum(x * variable(values, need_grad=False)), tracker)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.floats(1e-9, 1e-3), st.booleans())
def test_computes_the_scale_of_the_core_and_takes_it_back(seed: int, size: float, lognormal: bool) -> None:
    rng = np.random.default_rng(seed)
    values = (size * np.exp(rng.standard_normal(64)) * rng.choice([-1, 1, 1], 64)).astype(np.float32)
    config = AdaLossConfig(use_bound=False)
    tracker = ScaleTracker(config, scale=4.0)
    w, loss = scaled(values, tracker, lognormal=lognormal)
    loss.forward(clear_no_need_grad=True)
    (gradient,) = gradients([w], lambda: loss.backward(clear_buffer=True))
    expected = get_loss_scale_by_approx_range(4 * values, config=config, lognormal=lognormal)
    assert tracker.layer_scales == {"CastLossScaling": float(get_power_of_two_scale(expected))}
    assert tracker.accumulated_scales["CastLossScaling"] == 4.0 * tracker.layer_scales["CastLossScaling"]
    np.testing.assert_array_equal(bits(gradient), bits(values))


def test_the_lognormal_scale_differs_from_the_normal_one() -> None:
    values = np.exp(np.random.default_rng(0).standard_normal(1000) * 3 - 14)
    alphas = []
    for lognormal in (False, True):
        tracker = ScaleTracker(AdaLossConfig(use_bound=False))
        w, loss = scaled(values, tracker, lognormal=lognormal)
        loss.forward()
        gradients([w], loss.backward)
        alphas.append(tracker.layer_scales["CastLossScaling"])
    assert alphas[1] > alphas[0] >= 1.0


def test_bounds_and_overflow_apply() -> None:
    for value, scale in ((1e-9, 16.0), (1e6, 2.0**-7)):
        tracker = ScaleTracker()
        w, loss = scaled(np.full(3, value) * [1, -1, 1], tracker)
        loss.forward()
        gradients([w], loss.backward)
        assert tracker.layer_scales == {"CastLossScaling": scale}


def test_zero_and_nonfinite_gradients_get_no_scale() -> None:
    for value in (0.0, np.inf, np.nan):
        tracker = ScaleTracker()
        w, loss = scaled(np.full(3, value), tracker, lognormal=True)
        loss.forward()
        gradients([w], loss.backward)
        assert tracker.layer_scales == {"CastLossScaling": 1.0}


def test_casts_are_told_apart() -> None:
    tracker = ScaleTracker()
    w = variable([1.0, 2.0])
    x = cast_loss_scaling(cast_loss_scaling(unscale(w, tracker), tracker), tracker)
    loss = loss_scaling(F.sum(x * variable([1e-8, -1e-8], need_grad=False)), tracker)
    loss.forward()
    gradients([w], loss.backward)
    assert tracker.layer_scales == {"CastLossScaling#2": 16.0, "CastLossScaling": 8.0}


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(TypeError, match=r"^tracker must be"):
        cast_loss_scaling(variable([1.0]), 8.0)
    with pytest.raises(TypeError, match=r"^lognormal="):
        cast_loss_scaling(variable([1.0]), ScaleTracker(), lognormal=1)
