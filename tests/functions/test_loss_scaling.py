# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import List

import nnabla.functions as F
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nnabla_adaloss.functions import ScaleTracker, loss_scaling, unscale
from tests.functions.graphs import gradients, gradients_of, variable
from tests.worlds.values import bits


@settings(max_examples=30, deadline=None)
@given(st.integers(-30, 30), st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=6))
def test_multiplies_the_gradient_exactly(exponent: int, values: List[float]) -> None:
    x = variable(values)
    weights = variable(np.arange(len(values)) - 1.5, need_grad=False)
    (scaled,) = gradients_of(loss_scaling(F.tanh(x) * weights, 2.0**exponent), x, clear=True)
    (native,) = gradients_of(F.tanh(x) * weights, x)
    np.testing.assert_array_equal(bits(scaled), bits(native * np.float32(2.0**exponent)))


def test_accumulates_over_uses_and_over_calls() -> None:
    x = variable([1.0, 2.0])
    y = F.sum(loss_scaling(x, 4.0) + x + loss_scaling(x, 0.5))
    np.testing.assert_array_equal(gradients_of(y, x, clear=True, times=2)[0], [11.0, 11.0])


def test_does_not_run_backward_without_need() -> None:
    x = variable([1.0], need_grad=False)
    y = loss_scaling(x, 3.0)
    y.forward()
    y.backward()
    assert not y.need_grad


def test_a_tracked_loss_carries_the_scale_of_the_tracker_as_it_is_now() -> None:
    tracker = ScaleTracker(scale=2.0)
    w = variable([3.0])
    v = unscale(w, tracker)
    loss = loss_scaling(F.sum(v * v), tracker)
    loss.forward()
    for scale in (2.0, 1024.0):
        tracker.scale = scale
        np.testing.assert_array_equal(gradients([w], loss.backward)[0], [6.0])
        assert v.g[0] == 6.0 * scale
