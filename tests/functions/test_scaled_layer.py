# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any, Tuple

import nnabla as nn
import nnabla.functions as F
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nnabla_adaloss import (
    AdaLossConfig,
    ScaleTracker,
    adaptive_loss_scaling,
    cast_loss_scaling,
    get_loss_scale,
    get_loss_scale_by_approx_range,
    get_power_of_two_scale,
    loss_scaling,
    unscale,
)
from tests.functions.graphs import gradients, gradients_of, variable
from tests.worlds.monitors import Records
from tests.worlds.values import bits

HALF = nn.Context(["cpu:half"], "CpuCachedArray", "0")


def normal(*shape: int) -> nn.Variable:
    return variable(np.random.default_rng(len(shape)).standard_normal(shape))


def one_layer(
    tracker: ScaleTracker, x: nn.Variable, w: nn.Variable, gradient: Any
) -> Tuple[nn.Variable, nn.Variable]:
    """A layer whose output gradient is `gradient`, and the loss."""
    v = unscale(w, tracker)
    y = adaptive_loss_scaling(F.affine(unscale(x, tracker), v), v, tracker)
    return v, loss_scaling(F.sum(y * variable(gradient, need_grad=False)), tracker)


@pytest.mark.slow
@pytest.mark.gate
@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**31),
    st.integers(-8, 2).map(lambda k: 10.0**k),
    st.sampled_from(["approx_range", "abs_range"]),
    st.booleans(),
)
@example(1_414_677_765, 1e-8, "abs_range", False)
def test_applies_the_scale_of_the_core(seed: int, size: float, method: str, use_bound: bool) -> None:
    rng = np.random.default_rng(seed)
    g, w = size * rng.standard_normal((4, 6)).astype(np.float32), rng.standard_normal((5, 6))
    config = AdaLossConfig(loss_scale_method=method, use_bound=use_bound)
    tracker = ScaleTracker(config, scale=4.0)
    x, w = variable(rng.standard_normal((4, 5))), variable(w)
    v, loss = one_layer(tracker, x, w, g)
    scaled = gradients_of(loss, x, w, clear=True)
    alpha = float(get_loss_scale(np.float32(4) * g, w.d, config=config, fan_in=6, prev_scale=4.0))
    # The scaled weight is stored in float16 as well.
    alpha = min(alpha, max(2.0 ** np.floor(np.log2(65504.0 / np.abs(w.d).max())), 1.0))
    assert tracker.layer_scales == {"Affine": alpha}
    assert tracker.accumulated_scales == {"Affine": 4.0 * alpha}
    plain = F.sum(F.affine(x, w) * variable(g, need_grad=False))
    native = gradients_of(plain, x, w)
    for a, b in zip(scaled, native):
        np.testing.assert_array_equal(bits(a), bits(b))


def test_the_weight_gradient_carries_s_and_the_input_gradient_s_times_alpha() -> None:
    config = AdaLossConfig(loss_scale_method="fixed", fixed_loss_scale=16.0)
    tracker = ScaleTracker(config, scale=2.0)
    x, w = variable(np.ones((1, 2))), variable(np.ones((2, 2)))
    v, loss = one_layer(tracker, x, w, np.ones((1, 2)))
    gradients_of(loss, x, w)
    np.testing.assert_array_equal(v.g, np.full((2, 2), 2.0))
    h = v.function_references[0].inputs[0]
    np.testing.assert_array_equal(h.g, np.full((1, 2), 2.0 * 16.0 * 2))


def test_the_input_gradient_is_scaled_before_it_is_stored() -> None:
    # The products are 2**-26, which float16 does not have; with alpha they are.
    x, w = variable(np.ones((1, 2))), variable(np.full((2, 2), 2.0**-14))
    found = {}
    for method in ("approx_range", "fixed"):
        with nn.context_scope(HALF):
            tracker = ScaleTracker(AdaLossConfig(loss_scale_method=method), scale=2.0**-12)
            _, loss = one_layer(tracker, x, w, np.ones((1, 2)))
            found[method] = gradients_of(loss, x, w)
    np.testing.assert_array_equal(found["approx_range"][0], np.full((1, 2), 2.0**-13))
    np.testing.assert_array_equal(found["fixed"][0], np.full((1, 2), 2.0**-13) * 0)
    np.testing.assert_array_equal(found["approx_range"][1], np.ones((2, 2)))
    assert w.data.dtype == np.float32


def test_backward_may_run_again_without_forward() -> None:
    tracker = ScaleTracker(AdaLossConfig(u_min=1.0, use_bound=False), scale=1.0)
    rng = np.random.default_rng(0)
    x, w = variable(rng.standard_normal((4, 5))), variable(rng.standard_normal((5, 6)))
    before = w.d.copy()
    v, loss = one_layer(tracker, x, w, rng.standard_normal((4, 6)))
    first, scales = gradients_of(loss, x, w), tracker.layer_scales
    assert scales["Affine"] > 1.0
    second = gradients([x, w], loss.backward)
    assert tracker.layer_scales == scales
    for a, b in zip(first, second):
        np.testing.assert_array_equal(bits(a), bits(b))
    np.testing.assert_array_equal(w.d, before)
    loss.forward()
    np.testing.assert_array_equal(v.d, before)


def test_layers_may_share_a_weight() -> None:
    config = AdaLossConfig(loss_scale_method="fixed", fixed_loss_scale=4.0)
    tracker = ScaleTracker(config)
    rng = np.random.default_rng(0)
    x, w = variable(rng.standard_normal((3, 4))), variable(rng.standard_normal((4, 4)))
    h, p = unscale(x, tracker), x
    for _ in range(3):
        v = unscale(w, tracker)
        h, p = F.tanh(adaptive_loss_scaling(F.affine(h, v), v, tracker)), F.tanh(F.affine(p, w))
    loss, plain = loss_scaling(F.sum(h), tracker), F.sum(p)
    scaled, native = gradients_of(loss, x, w), gradients_of(plain, x, w)
    np.testing.assert_array_equal(bits(scaled[0]), bits(native[0]))
    np.testing.assert_allclose(scaled[1], native[1], rtol=1e-6, atol=1e-6)
    assert tracker.accumulated_scales["Affine"] == 8.0 * 4.0**3


def test_recomputation_changes_nothing() -> None:
    rng = np.random.default_rng(0)
    x, w, last = (variable(rng.standard_normal((4, 4))) for _ in range(3))

    def build(recompute: bool) -> nn.Variable:
        tracker = ScaleTracker(AdaLossConfig(loss_scale_method="fixed", fixed_loss_scale=4.0))
        with nn.recompute(recompute):
            v = unscale(w, tracker)
            h = F.tanh(adaptive_loss_scaling(F.affine(unscale(x, tracker), v), v, tracker))
        return loss_scaling(F.sum(F.affine(h, unscale(last, tracker))), tracker)

    found = [gradients_of(build(recompute), x, w, last, clear=True) for recompute in (False, True)]
    for a, b in zip(*found):
        np.testing.assert_array_equal(bits(a), bits(b))


def test_a_frozen_weight_is_scaled_too() -> None:
    tracker = ScaleTracker(AdaLossConfig(loss_scale_method="fixed", fixed_loss_scale=4.0))
    x, w = variable(np.ones((1, 2))), variable(np.full((2, 2), 3.0))
    w.need_grad = False
    _, loss = one_layer(tracker, x, w, np.ones((1, 2)))
    for _ in range(2):
        (g,) = gradients_of(loss, x, clear=True)
        np.testing.assert_array_equal(g, [[6.0, 6.0]])
    assert tracker.layer_scales == {"Affine": 4.0}


def test_layers_can_be_excluded_and_the_first_one_needs_none() -> None:
    with nn.parameter_scope("net"):
        ws = [nn.parameter.get_parameter_or_create(f"fc{i}/W", (3, 3), need_grad=True) for i in range(3)]
    for w in ws:
        w.d = np.eye(3)
    tracker = ScaleTracker(AdaLossConfig(loss_scale_method="fixed", fixed_loss_scale=4.0, exclude=("*fc1",)))
    h = variable(np.ones((2, 3)), need_grad=False)
    for w in ws:
        v = unscale(w, tracker)
        h = adaptive_loss_scaling(F.affine(h, v), v, tracker)
    for g in gradients_of(loss_scaling(F.sum(h), tracker), *ws):
        np.testing.assert_array_equal(g, np.full((3, 3), 2.0))
    assert tracker.layer_scales == {"net/fc2": 4.0}


def test_an_input_that_is_frozen_later_needs_no_scale() -> None:
    tracker = ScaleTracker(AdaLossConfig(loss_scale_method="fixed", fixed_loss_scale=4.0))
    x, w = variable(np.ones((1, 2))), variable(np.full((2, 2), 3.0))
    _, loss = one_layer(tracker, x, w, np.ones((1, 2)))
    gradients_of(loss, x, w)
    assert tracker.layer_scales == {"Affine": 4.0}
    x.need_grad = False
    loss.parent.inputs[0].forward()
    (g,) = gradients_of(loss_scaling(loss.parent.inputs[0], tracker), w)
    np.testing.assert_array_equal(g, np.ones((2, 2)))
    assert tracker.layer_scales == {}


@pytest.mark.parametrize("tracked", [False, True])
def test_scales_are_kept_for_some_iterations(tracked: bool) -> None:
    monitor = Records()
    config = AdaLossConfig(update_per_n_iteration=2, use_bound=False)
    tracker = ScaleTracker(config, scale=1.0, monitors=[monitor])
    x, w = variable(np.ones((1, 2))), variable(np.ones((2, 2)))
    y = adaptive_loss_scaling(F.affine(x, w), w, config, monitors=[monitor])
    y.forward()
    for size in (1e-5, 1e-9, 1e-9):
        if tracked:
            gradients_of(one_layer(tracker, x, w, [[size, size]])[1], x, w)
        else:
            y.backward(np.float32([[size, -size]]))
    alphas = [record.alpha for record in monitor.records]
    assert alphas[0] == alphas[1] < alphas[2]


def test_functions_that_do_not_multiply_by_this_weight_are_refused() -> None:
    tracker = ScaleTracker()
    x, w = nn.Variable((3, 2)), variable(np.eye(2))
    v = unscale(w, tracker)
    y = F.affine(x, v)
    with pytest.raises(ValueError, match=r"^x is computed by no function"):
        adaptive_loss_scaling(x, v, tracker)
    with pytest.raises(ValueError, match=r"^x is the output of ReLU"):
        adaptive_loss_scaling(F.relu(y), v, tracker)
    with pytest.raises(ValueError, match=r"^x is the output of Affine, which does not multiply by w"):
        adaptive_loss_scaling(y, unscale(w, tracker), tracker)
    with pytest.raises(ValueError, match=r"^w must be the result of unscale\(weight, tracker\)"):
        adaptive_loss_scaling(F.affine(x, w), w, tracker)
    with pytest.raises(ValueError, match=r"^w must be the result of unscale\(weight, tracker\)"):
        adaptive_loss_scaling(y, v, ScaleTracker())
    with pytest.raises(TypeError, match=r"^w must be an nnabla.Variable, like x"):
        adaptive_loss_scaling(y, w.data, tracker)
    with pytest.raises(TypeError, match=r"^config must be a ScaleTracker or an AdaLossConfig"):
        adaptive_loss_scaling(y, v, None)
    with pytest.raises(ValueError, match=r"^monitors are those of the tracker"):
        adaptive_loss_scaling(y, v, tracker, monitors=[Records()])
    adaptive_loss_scaling(y, v, tracker)
    with pytest.raises(ValueError, match=r"^w is scaled by another layer"):
        adaptive_loss_scaling(F.affine(x, v), v, tracker)


@pytest.mark.any_context
@pytest.mark.parametrize("layer", ["affine", "convolution", "none"])
def test_a_gradient_without_a_tracker_is_multiplied_by_alpha(layer: str) -> None:
    # S is 1, and there is no iteration before.
    monitor, config = Records(), AdaLossConfig(init_scale=4.0, delay=1)
    if layer == "convolution":
        x, w = normal(2, 3, 8, 8), normal(4, 3, 3, 3)
        h, fan_in = F.convolution(x, w), 36
    elif layer == "affine":
        x, w = normal(4, 3), normal(3, 5)
        h, fan_in = F.affine(x, w), 5
    else:
        x, w = normal(4, 5), normal(3, 5)
        h, fan_in = F.tanh(x), 5
    y = adaptive_loss_scaling(h, w, config, monitors=[monitor])
    g = (np.random.default_rng(0).standard_normal(y.shape) * 1e-6).astype(np.float32)
    y.forward()
    np.testing.assert_array_equal(y.d, h.d)
    y.backward(g)
    alpha = float(get_loss_scale(g, w.d, config=AdaLossConfig(), fan_in=fan_in))
    assert alpha > 1.0
    np.testing.assert_array_equal(h.g, np.float32(alpha) * g)
    assert [(r.layer, r.alpha, r.previous_scale) for r in monitor.records] == [
        ("AdaptiveGradientScale", alpha, 1.0)
    ]


@pytest.mark.parametrize("tracked", [False, True])
def test_a_method_of_arrays_gets_matrices_as_in_a_network(tracked: bool) -> None:
    seen = []

    def method(g: np.ndarray, W: np.ndarray, *, config: AdaLossConfig, fan_in: float) -> float:
        seen.append((g.copy(), W.copy()))
        return 1.0

    x, w = normal(4, 3), normal(3, 5)
    for config in (AdaLossConfig(method), AdaLossConfig("element_wise_range")):
        if tracked:
            gradients_of(one_layer(ScaleTracker(config), x, w, np.ones((4, 5)))[1], x, w)
        else:
            gradients_of(F.sum(8.0 * adaptive_loss_scaling(F.affine(x, w), w, config)), x)
    ((g, W),) = seen
    np.testing.assert_array_equal(g, np.full((4, 5), 8.0))
    np.testing.assert_array_equal(W, w.d.T)


@pytest.mark.parametrize("tracked", [False, True])
def test_the_element_that_is_in_most_products_may_not_overflow(tracked: bool) -> None:
    # The middle is in four products, an element in 2.25 on average.
    config = AdaLossConfig("fixed", fixed_loss_scale=4.0)
    tracker = ScaleTracker(config, scale=1.0)
    x, w = variable(np.ones((1, 1, 5, 5))), variable(np.ones((1, 1, 3, 3)))
    h, v = (unscale(x, tracker), unscale(w, tracker)) if tracked else (x, w)
    y = adaptive_loss_scaling(F.convolution(h, v, stride=(2, 2)), v, tracker if tracked else config)
    loss = F.sum(y * (65504.0 / 4 / 1.5))
    if tracked:
        gradients_of(loss_scaling(loss, tracker), x, w)
        assert tracker.layer_scales == {"Convolution": 1.0}
    else:
        (g,) = gradients_of(loss, x)
        assert np.abs(g).max() <= 65504.0


def test_the_scaled_weight_stays_in_range() -> None:
    tracker = ScaleTracker(AdaLossConfig("fixed", fixed_loss_scale=16.0))
    x, w = variable(np.ones((1, 2))), variable(np.full((2, 2), 20000.0))
    _, loss = one_layer(tracker, x, w, np.full((1, 2), 1e-6))
    gradients_of(loss, x, w)
    assert tracker.layer_scales == {"Affine": 2.0}


# ---- casts


def cast(values: np.ndarray, tracker: ScaleTracker, **kwargs: Any) -> Tuple[nn.Variable, nn.Variable]:
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
    w, loss = cast(values, tracker, lognormal=lognormal)
    (gradient,) = gradients_of(loss, w, clear=True)
    expected = get_loss_scale_by_approx_range(4 * values, config=config, lognormal=lognormal)
    assert tracker.layer_scales == {"CastLossScaling": float(get_power_of_two_scale(expected))}
    assert tracker.accumulated_scales["CastLossScaling"] == 4.0 * tracker.layer_scales["CastLossScaling"]
    np.testing.assert_array_equal(bits(gradient), bits(values))


def test_bounds_and_overflow_apply_to_the_gradient_of_each_iteration() -> None:
    tracker = ScaleTracker()
    for value, scale in ((1e6, 2.0**-7), (1e-9, 16.0)):
        w, loss = cast(np.full(3, value) * [1, -1, 1], tracker)
        gradients_of(loss, w)
        assert tracker.layer_scales == {"CastLossScaling": scale}


def test_casts_are_told_apart() -> None:
    tracker = ScaleTracker()
    w = variable([1.0, 2.0])
    x = cast_loss_scaling(cast_loss_scaling(unscale(w, tracker), tracker), tracker)
    loss = loss_scaling(F.sum(x * variable([1e-8, -1e-8], need_grad=False)), tracker)
    gradients_of(loss, w)
    assert tracker.layer_scales == {"CastLossScaling#2": 16.0, "CastLossScaling": 8.0}
