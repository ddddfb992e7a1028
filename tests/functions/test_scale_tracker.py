# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
from typing import Callable, Dict, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest

from nnabla_adaloss import (
    AdaLossConfig,
    ScaleTracker,
    adaptive_loss_scaling,
    branch,
    cast_loss_scaling,
    loss_scaling,
    unscale,
)
from tests.functions.graphs import gradients, gradients_of, variable


def test_a_tracker_before_the_first_backward() -> None:
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


def test_gradients_listed_twice_are_unscaled_once() -> None:
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


# ---- a graph whose gradients would be wrong is refused when the loss is scaled

TRACKER = ScaleTracker(AdaLossConfig(loss_scale_method="fixed", fixed_loss_scale=4.0))


def unscaled(v: nn.Variable) -> nn.Variable:
    return unscale(v, TRACKER)


def affine_of(h: nn.Variable, v: nn.Variable) -> nn.Variable:
    return adaptive_loss_scaling(F.affine(h, v), v, TRACKER)


def layer(h: nn.Variable, w: nn.Variable) -> nn.Variable:
    return affine_of(h, unscaled(w))


@pytest.fixture
def w() -> nn.Variable:
    return variable(np.eye(2))


@pytest.fixture
def x() -> nn.Variable:
    return variable(np.ones((3, 2)))


def copy_of_a_weight_used_besides(x: nn.Variable, w: nn.Variable) -> nn.Variable:
    v = unscaled(w)
    return F.affine(affine_of(F.relu(unscaled(x)), v), v)


def copy_of_a_frozen_weight_used_besides(x: nn.Variable, w: nn.Variable) -> nn.Variable:
    w.need_grad = False
    return copy_of_a_weight_used_besides(x, w)


def outputs_at_two_scales(x: nn.Variable, w: nn.Variable) -> nn.Variable:
    a, b = F.split(F.reshape(unscaled(x), (3, 2, 1)), axis=1)
    return layer(a, variable(np.ones((1, 2)))) + F.tanh(b)


# What is no sum yet, and what the message says.
REFUSED: Dict[str, Tuple[Callable[[nn.Variable, nn.Variable], nn.Variable], str]] = {
    "a parameter without unscale": (
        lambda x, w: F.affine(unscaled(x), w),
        r"Affine .* shape \(2, 2\).* unscale\(w, tracker\)",
    ),
    "an input without unscale": (lambda x, w: F.tanh(x), r"Tanh .* shape \(3, 2\)"),
    "an input of branch": (lambda x, w: branch(x, 2, TRACKER)[1], r"Branch .* shape \(3, 2\)"),
    "a layer by its name": (lambda x, w: PF.affine(x, 4, name="fc"), "fc/affine"),
    "no branch": (
        lambda x, w: layer(h := F.tanh(unscaled(x)), w) + h,
        r"Tanh, of shape \(3, 2\).* branch\(x, n, tracker\)",
    ),
    "one unscale": (
        lambda x, w: F.affine(layer(F.affine(unscaled(x), v := unscaled(w)), variable(np.eye(2))), v),
        r"Unscale, of shape \(2, 2\)",
    ),
    "outputs": (outputs_at_two_scales, "outputs of Split"),
    "clipping": (lambda x, w: F.clip_grad_by_norm(unscaled(x), 1.0), "ClipGradByNorm"),
    "output": (
        lambda x, w: adaptive_loss_scaling(y := F.affine(unscaled(x), v := unscaled(w)), v, TRACKER) + y,
        r"^x, of shape \(3, 2\), feeds a function besides",
    ),
    "copy": (copy_of_a_weight_used_besides, r"w, of shape \(2, 2\), feeds a function besides|branch\("),
    "frozen copy": (copy_of_a_frozen_weight_used_besides, r"w, of shape \(2, 2\), feeds a function besides"),
    "scaled twice": (
        lambda x, w: loss_scaling(F.sum(unscaled(x)), TRACKER) * 2.0,
        "^x is scaled already",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_would_give_a_wrong_gradient_are_refused(
    name: str, x: nn.Variable, w: nn.Variable
) -> None:
    made, message = REFUSED[name]
    y = made(x, w)
    with pytest.raises(ValueError, match=message):
        loss_scaling(F.sum(y), TRACKER)


def test_a_fan_out_at_one_scale_needs_no_branch(x: nn.Variable, w: nn.Variable) -> None:
    h = F.tanh(unscaled(x))
    (g,) = gradients_of(loss_scaling(F.sum(layer(F.relu(h) + h * h, w)), TRACKER), x)
    np.testing.assert_allclose(g, (1 + 2 * np.tanh(1.0)) * (1 - np.tanh(1.0) ** 2), rtol=1e-6)
    a, b = branch(F.tanh(unscaled(x)), 2, TRACKER)
    loss_scaling(F.sum(layer(a, w) + b), TRACKER)


def test_behind_unscale_everything_is_as_without_scaling(x: nn.Variable, w: nn.Variable) -> None:
    def graph(u: Callable[[nn.Variable], nn.Variable]) -> nn.Variable:
        clipped = F.clip_grad_by_norm(x, 0.5)
        a, b = 2.0 * w, F.transpose(w, (1, 0))
        return F.sum(F.affine(F.affine(u(clipped), u(a)), u(b)) * F.affine(u(clipped), u(a)))

    hand, plain = loss_scaling(graph(unscaled), TRACKER), graph(lambda v: v)
    for a, b in zip(gradients_of(hand, x, w), gradients_of(plain, x, w)):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_a_loss_without_gradient_is_left_alone() -> None:
    assert not loss_scaling(F.sum(nn.Variable((2,))), TRACKER).need_grad
