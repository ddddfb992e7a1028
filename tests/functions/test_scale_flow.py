# SPDX-License-Identifier: Apache-2.0
"""What would give a wrong gradient is refused when the loss is scaled."""

from __future__ import annotations

from typing import Callable

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig
from nnabla_adaloss.functions import ScaleTracker, adaptive_loss_scaling, branch, loss_scaling, unscale
from tests.functions.graphs import gradients, variable

TRACKER = ScaleTracker(AdaLossConfig(loss_scale_method="fixed", fixed_loss_scale=4.0))


def layer(h: nn.Variable, w: nn.Variable, tracker: ScaleTracker = TRACKER) -> nn.Variable:
    v = unscale(w, tracker)
    return adaptive_loss_scaling(F.affine(h, v), v, tracker)


@pytest.fixture
def w() -> nn.Variable:
    return variable(np.eye(2))


@pytest.fixture
def x() -> nn.Variable:
    return variable(np.ones((3, 2)))


def test_a_parameter_without_unscale(x: nn.Variable, w: nn.Variable) -> None:
    y = F.affine(unscale(x, TRACKER), w)
    with pytest.raises(ValueError, match=r"Affine .* shape \(2, 2\).* unscale\(w, tracker\)"):
        loss_scaling(F.sum(y), TRACKER)


def test_an_input_with_a_gradient_without_unscale(x: nn.Variable) -> None:
    with pytest.raises(ValueError, match=r"Tanh .* shape \(3, 2\)"):
        loss_scaling(F.sum(F.tanh(x)), TRACKER)
    with pytest.raises(ValueError, match=r"Branch .* shape \(3, 2\)"):
        loss_scaling(F.sum(branch(x, 2, TRACKER)[1]), TRACKER)


def test_a_parameter_is_named_by_its_layer() -> None:
    nn.clear_parameters()
    y = PF.affine(nn.Variable((3, 2)), 4, name="fc")
    with pytest.raises(ValueError, match="fc/affine"):
        loss_scaling(F.sum(y), TRACKER)
    nn.clear_parameters()


def test_a_fan_out_at_different_scales_without_branch(x: nn.Variable, w: nn.Variable) -> None:
    h = F.tanh(unscale(x, TRACKER))
    with pytest.raises(ValueError, match=r"Tanh, of shape \(3, 2\).* branch\(x, n, tracker\)"):
        loss_scaling(F.sum(layer(h, w) + h), TRACKER)
    a, b = branch(h, 2, TRACKER)
    loss_scaling(F.sum(layer(a, w) + b), TRACKER)


def test_a_fan_out_at_one_scale_needs_no_branch(x: nn.Variable, w: nn.Variable) -> None:
    h = F.tanh(unscale(x, TRACKER))
    loss = loss_scaling(F.sum(layer(F.relu(h) + h * h, w)), TRACKER)
    loss.forward()
    (g,) = gradients([x], loss.backward)
    np.testing.assert_allclose(g, (1 + 2 * np.tanh(1.0)) * (1 - np.tanh(1.0) ** 2), rtol=1e-6)


def test_one_unscale_for_uses_at_different_scales(x: nn.Variable, w: nn.Variable) -> None:
    v = unscale(w, TRACKER)
    h = layer(F.affine(unscale(x, TRACKER), v), variable(np.eye(2)))
    with pytest.raises(ValueError, match=r"TrackedUnscale, of shape \(2, 2\)"):
        loss_scaling(F.sum(F.affine(h, v)), TRACKER)


def test_outputs_at_different_scales(x: nn.Variable, w: nn.Variable) -> None:
    a, b = F.split(F.reshape(unscale(x, TRACKER), (3, 2, 1)), axis=1)
    y = layer(a, variable(np.ones((1, 2)))) + F.tanh(b)
    with pytest.raises(ValueError, match="outputs of Split"):
        loss_scaling(F.sum(y), TRACKER)


def test_clipping_of_a_scaled_gradient(x: nn.Variable) -> None:
    y = F.clip_grad_by_norm(unscale(x, TRACKER), 1.0)
    with pytest.raises(ValueError, match="ClipGradByNorm"):
        loss_scaling(F.sum(y), TRACKER)


def test_behind_unscale_everything_is_as_without_scaling(x: nn.Variable, w: nn.Variable) -> None:
    def graph(u: Callable[[nn.Variable], nn.Variable]) -> nn.Variable:
        clipped = F.clip_grad_by_norm(x, 0.5)
        a, b = 2.0 * w, F.transpose(w, (1, 0))
        return F.sum(F.affine(F.affine(u(clipped), u(a)), u(b)) * F.affine(u(clipped), u(a)))

    hand, plain = loss_scaling(graph(lambda v: unscale(v, TRACKER)), TRACKER), graph(lambda v: v)
    hand.forward()
    plain.forward()
    for a, b in zip(gradients([x, w], hand.backward), gradients([x, w], plain.backward)):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_the_output_of_a_layer_used_besides(x: nn.Variable, w: nn.Variable) -> None:
    v = unscale(w, TRACKER)
    y = F.affine(unscale(x, TRACKER), v)
    scaled = adaptive_loss_scaling(y, v, TRACKER)
    with pytest.raises(ValueError, match=r"x, of shape \(3, 2\), feeds a function besides"):
        loss_scaling(F.sum(scaled + y), TRACKER)


@pytest.mark.parametrize("need_grad", [True, False])
def test_the_copy_of_a_weight_used_besides(x: nn.Variable, w: nn.Variable, need_grad: bool) -> None:
    w.need_grad = need_grad
    v = unscale(w, TRACKER)
    y = adaptive_loss_scaling(F.affine(F.relu(unscale(x, TRACKER)), v), v, TRACKER)
    with pytest.raises(ValueError, match=r"w, of shape \(2, 2\), feeds a function besides|branch\("):
        loss_scaling(F.sum(F.affine(y, v)), TRACKER)


def test_a_loss_scaled_twice(x: nn.Variable) -> None:
    inner = loss_scaling(F.sum(unscale(x, TRACKER)), TRACKER)
    with pytest.raises(ValueError, match=r"^x has been scaled already"):
        loss_scaling(inner * 2.0, TRACKER)


def test_a_loss_without_gradient_is_left_alone() -> None:
    loss = loss_scaling(F.sum(nn.Variable((2,))), TRACKER)
    assert not loss.need_grad
