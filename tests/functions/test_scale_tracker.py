# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc

import nnabla.functions as F
import numpy as np
import pytest

from nnabla_adaloss.functions import (
    ScaleTracker,
    adaptive_loss_scaling,
    branch,
    cast_loss_scaling,
    loss_scaling,
    unscale,
)
from tests.functions.graphs import gradients, gradients_of, variable


def test_before_the_first_backward() -> None:
    tracker = ScaleTracker()
    assert (tracker.layer_scales, tracker.accumulated_scales, tracker.found_inf) == ({}, {}, False)
    with pytest.raises(TypeError, match=r"^scale="):
        tracker.scale = None
    assert tracker.scale == 8.0


def test_a_graph_built_anew_in_each_iteration_leaves_nothing_behind() -> None:
    tracker = ScaleTracker()
    w = variable(np.eye(4))
    x = variable(np.ones((2, 4)), need_grad=False)
    found = []
    for i in range(5):
        v = unscale(w, tracker)
        y = F.tanh(adaptive_loss_scaling(F.affine(F.tanh(F.affine(x, unscale(w, tracker))), v), v, tracker))
        a, b = branch(y, 2, tracker)
        loss = loss_scaling(F.sum(a + float(i) * cast_loss_scaling(b, tracker)), tracker)
        (g,) = gradients_of(loss, w)
        found.append(g)
        np.testing.assert_allclose(g, (1 + i) * found[0], rtol=1e-5)
        del v, y, a, b, loss
        gc.collect()
        assert len(tracker.functions) == 0


def test_two_trackers_do_not_know_of_each_other() -> None:
    trackers = [ScaleTracker(scale=2.0), ScaleTracker(scale=32.0)]
    w = variable([3.0])
    losses = [loss_scaling(F.sum(unscale(w, t) * 5.0), t) for t in trackers]
    for loss in losses:
        loss.forward()
    both = gradients([w], lambda: [loss.backward() for loss in losses])
    np.testing.assert_array_equal(both[0], [10.0])
    with pytest.raises(ValueError, match="Unscale"):
        loss_scaling(F.sum(unscale(w, 2.0)), trackers[0])


def test_what_is_unscaled_twice_is_unscaled_once() -> None:
    tracker = ScaleTracker(scale=2.0)
    w = variable([3.0])
    loss = loss_scaling(F.sum(unscale(unscale(w, tracker), tracker)), tracker)
    np.testing.assert_array_equal(gradients_of(loss, w, times=2)[0], [2.0])


def test_scales_are_those_of_the_last_backward() -> None:
    tracker = ScaleTracker()
    w = variable([3.0])
    gradients_of(loss_scaling(F.sum(cast_loss_scaling(unscale(w, tracker), tracker)), tracker), w)
    assert tracker.layer_scales == {"CastLossScaling": 1.0}
    gradients_of(loss_scaling(F.sum(unscale(w, tracker)), tracker), w)
    assert tracker.layer_scales == tracker.accumulated_scales == {}
