# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import List

import nnabla as nn
import nnabla.functions as F
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nnabla.ext_utils import get_extension_context

from nnabla_adaloss import AdaLossConfig, ScaleTracker, loss_scaling, unscale
from tests.functions.graphs import cause, gradients, gradients_of, variable
from tests.worlds.values import bits

HALF = get_extension_context("cpu", type_config="half")


@settings(max_examples=30, deadline=None)
@given(st.integers(-30, 30), st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=6))
def test_loss_scaling_multiplies_and_unscale_takes_it_back(exponent: int, values: List[float]) -> None:
    x, w, scale = variable(values), variable(values), 2.0**exponent
    scaled = gradients_of(loss_scaling(F.sum(F.sin(x) + F.sin(unscale(w, scale))), scale), x, w, clear=True)
    (plain,) = gradients_of(F.sum(F.sin(x)), x)
    np.testing.assert_array_equal(bits(scaled[0]), bits(plain * np.float32(scale)))
    np.testing.assert_array_equal(bits(scaled[1]), bits(plain))


@pytest.mark.parametrize("init_scale", [1.0, 4.0])
def test_a_tracked_loss_carries_the_scale_of_the_tracker_as_it_is_now(init_scale: float) -> None:
    tracker = ScaleTracker(AdaLossConfig(init_scale=init_scale))
    w = variable([3.0])
    v = unscale(w, tracker)
    loss = loss_scaling(F.sum(v * v), tracker)
    loss.forward()
    for scale in (2.0, 1024.0):
        tracker.scale = scale
        np.testing.assert_array_equal(gradients([w], loss.backward)[0], [6.0])
        assert v.g[0] == 6.0 * init_scale * scale


@pytest.mark.parametrize("tracked", [False, True])
def test_gradients_of_uses_and_calls_are_added(tracked: bool) -> None:
    scale = ScaleTracker(scale=8.0) if tracked else 8.0
    w = variable([1.0, 2.0])
    loss = loss_scaling(F.sum(unscale(w, scale) + 3.0 * unscale(w, scale)), scale)
    np.testing.assert_array_equal(gradients_of(loss, w, clear=True, times=2)[0], [8.0, 8.0])


def test_scaled_uses_are_added() -> None:
    x = variable([1.0, 2.0])
    y = F.sum(loss_scaling(x, 4.0) + x + loss_scaling(x, 0.5))
    np.testing.assert_array_equal(gradients_of(y, x, clear=True, times=2)[0], [11.0, 11.0])


def test_the_gradient_is_float32_where_float16_would_lose_it() -> None:
    tracker = ScaleTracker(scale=2.0**15)
    with nn.context_scope(HALF):
        w = variable([1.0, 2.0])
        loss = loss_scaling(F.sum(unscale(w, tracker) * 2.0**-14 * 2.0**-14), tracker)
        (gradient,) = gradients_of(loss, w)
    assert w.grad.dtype == np.float32
    assert w.data.dtype == np.float32
    np.testing.assert_array_equal(gradient, [2.0**-28, 2.0**-28])


def test_a_float16_gradient_that_is_added_to_becomes_float32() -> None:
    w = variable([1.0])
    w.grad = nn.NdArray.from_numpy_array(np.array([0.5], np.float16))
    y = unscale(w, 2.0**20)
    y.forward()
    y.backward()
    assert w.grad.dtype == np.float32
    np.testing.assert_array_equal(w.g, [0.5 + 2.0**-20])


def test_lazily_zero_arrays_stay_lazily_zero() -> None:
    w = variable([1.0, 2.0])
    y = unscale(w, 4.0)
    y.forward()
    w.g = 7.0
    y.grad.zero()
    y.parent.backward([w], [y], [False])
    assert w.grad.zeroing
    w.g = 3.0
    y.parent.backward([w], [y], [True])
    np.testing.assert_array_equal(w.g, [3.0, 3.0])


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_nonfinite_arrays_are_reported(bad: float) -> None:
    tracker = ScaleTracker()
    w, factor = variable([1.0, 2.0]), variable([1.0, bad], need_grad=False)
    loss = loss_scaling(F.sum(unscale(w, tracker) * factor), tracker)
    gradients_of(loss, w)
    assert tracker.found_inf
    factor.d = 1.0
    gradients_of(loss, w)
    assert not tracker.found_inf


def test_a_frozen_parameter_gets_no_gradient() -> None:
    tracker = ScaleTracker()
    w, x = variable([2.0], need_grad=False), variable([3.0])
    loss = loss_scaling(F.sum(unscale(w, tracker) * unscale(x, tracker)), tracker)
    np.testing.assert_array_equal(gradients_of(loss, x)[0], [2.0])


def test_backward_from_elsewhere_is_refused() -> None:
    tracker = ScaleTracker()
    w = variable([1.0])
    inner = F.sum(unscale(w, tracker))
    inner.forward()
    assert "did not start at" in str(cause(inner.backward))
    loss = loss_scaling(inner, tracker)
    loss.forward()
    loss.backward()
    assert "twice in one backward" in str(cause(inner.backward))


def test_the_last_loss_of_a_tracker_alone_is_valid() -> None:
    tracker = ScaleTracker()
    w = variable([1.0])
    inner = F.sum(unscale(w, tracker))
    first, second = loss_scaling(inner, tracker), loss_scaling(3.0 * inner, tracker)
    first.forward()
    np.testing.assert_array_equal(gradients_of(second, w)[0], [3.0])
    assert isinstance(cause(first.backward), RuntimeError)
    np.testing.assert_array_equal(gradients([w], second.backward)[0], [3.0])
