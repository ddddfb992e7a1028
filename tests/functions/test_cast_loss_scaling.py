# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any, Tuple

import nnabla as nn
import nnabla.functions as F
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nnabla_adaloss import AdaLossConfig, get_loss_scale_by_approx_range, get_power_of_two_scale
from nnabla_adaloss.functions import ScaleTracker, cast_loss_scaling, loss_scaling, unscale
from tests.functions.graphs import gradients_of, variable
from tests.worlds.values import bits


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
    (gradient,) = gradients_of(loss, w, clear=True)
    expected = get_loss_scale_by_approx_range(4 * values, config=config, lognormal=lognormal)
    assert tracker.layer_scales == {"CastLossScaling": float(get_power_of_two_scale(expected))}
    assert tracker.accumulated_scales["CastLossScaling"] == 4.0 * tracker.layer_scales["CastLossScaling"]
    np.testing.assert_array_equal(bits(gradient), bits(values))


def test_bounds_and_overflow_apply_to_the_gradient_of_each_iteration() -> None:
    tracker = ScaleTracker()
    for value, scale in ((1e6, 2.0**-7), (1e-9, 16.0)):
        w, loss = scaled(np.full(3, value) * [1, -1, 1], tracker)
        gradients_of(loss, w)
        assert tracker.layer_scales == {"CastLossScaling": scale}


def test_casts_are_told_apart() -> None:
    tracker = ScaleTracker()
    w = variable([1.0, 2.0])
    x = cast_loss_scaling(cast_loss_scaling(unscale(w, tracker), tracker), tracker)
    loss = loss_scaling(F.sum(x * variable([1e-8, -1e-8], need_grad=False)), tracker)
    gradients_of(loss, w)
    assert tracker.layer_scales == {"CastLossScaling#2": 16.0, "CastLossScaling": 8.0}
