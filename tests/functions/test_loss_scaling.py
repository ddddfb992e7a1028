# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from typing import Any, Iterable, List, Tuple

import nnabla as nn
import nnabla.functions as F
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nnabla.ext_utils import get_extension_context

from nnabla_adaloss import AdaLossConfig, ScaleTracker, branch, cast_loss_scaling, loss_scaling, unscale
from nnabla_adaloss.functions.loss_scaling import common_scale
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


# ---- branches


def casting(alphas: Iterable[float], **kwargs: Any) -> ScaleTracker:
    """A tracker whose casts have these scales, first in backward first."""
    scales = iter(alphas)
    return ScaleTracker(
        AdaLossConfig(
            loss_scale_method=lambda g, W, *, config, fan_in: next(scales), use_bound=False, **kwargs
        )
    )


def fan_out(
    tracker: ScaleTracker, w: nn.Variable, factors: Any
) -> Tuple[Tuple[nn.Variable, ...], nn.Variable]:
    """Branches whose gradients are the factors, each cast at a scale of its own, in backward order."""
    outputs = branch(unscale(w, tracker), len(factors), tracker)
    total = None
    for output, factor in zip(outputs, factors):
        term = F.mul2(cast_loss_scaling(output, tracker), variable(factor, need_grad=False))
        total = term if total is None else total + term
    return outputs, loss_scaling(F.sum(total), tracker)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([1, 2, 5]), st.integers(0, 2**31), st.data())
def test_adds_the_branches_at_one_scale(n: int, seed: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    alphas = [2.0**k for k in data.draw(st.lists(st.integers(-6, 12), min_size=n, max_size=n))]
    factors = rng.standard_normal((n, 7)).astype(np.float32)
    w = variable(rng.standard_normal(7))
    tracker = casting(alphas, dtype="float32")
    _, loss = fan_out(tracker, w, factors)
    (gradient,) = gradients_of(loss, w, clear=True)
    np.testing.assert_allclose(gradient, factors.astype(np.float64).sum(axis=0), rtol=1e-6, atol=1e-6)
    if n <= 2:
        np.testing.assert_array_equal(bits(gradient), bits(factors.sum(axis=0)))
    assert not tracker.found_inf


@pytest.mark.parametrize(
    ("alphas", "largest"), [((1.0, 64.0), 1.0), ((1.0, 64.0), 60000.0), ((0.25, 16.0), 5000.0)]
)
def test_takes_the_common_scale_of_the_core(alphas: Tuple[float, float], largest: float) -> None:
    w = variable([1.0, -1.0])
    tracker = casting(alphas)
    tracker.scale = 1.0
    factors = [[largest, 0.5], [2.0, 3.0]]
    outputs, loss = fan_out(tracker, w, factors)
    gradients_of(loss, w)
    scales = list(tracker.accumulated_scales.values())
    arrived = [np.abs(v.g).max() for v in outputs]
    # The last term is the first that backward reaches, so it has the first alpha.
    scale_of = [arrived[0] / largest, arrived[1] / 3.0]
    assert sorted(scale_of) == sorted(scales)
    expected = common_scale(list(zip(scale_of, arrived)), u_max=65504.0)
    merged = outputs[0].parent.inputs[0].g
    np.testing.assert_array_equal(merged, expected * np.sum(factors, axis=0, dtype=np.float32))


def test_adds_in_the_order_of_backward() -> None:
    values = np.float32([1.0, 2.0**-24, 2.0**-24])
    w = variable([1.0])

    def total(a: nn.Variable, b: nn.Variable, c: nn.Variable) -> nn.Variable:
        # Ranks make backward reach the deepest factor first: c, then b, then a.
        return F.sum((F.mul_scalar(a, values[0]) + F.mul_scalar(b, values[1])) + F.mul_scalar(c, values[2]))

    tracker = ScaleTracker(AdaLossConfig(dtype="float32"), scale=1.0)
    hand = loss_scaling(total(*branch(unscale(w, tracker), 3, tracker)), tracker)
    plain = total(F.identity(w), F.identity(w), F.identity(w))
    a, b = gradients_of(hand, w), gradients_of(plain, w)
    np.testing.assert_array_equal(bits(a[0]), bits(b[0]))


def test_an_unused_branch_adds_nothing() -> None:
    tracker = ScaleTracker()
    w = variable([3.0])
    _, b, _ = branch(unscale(w, tracker), 3, tracker)
    loss = loss_scaling(F.sum(b * b), tracker)
    np.testing.assert_array_equal(gradients_of(loss, w)[0], [6.0])


def test_branches_of_branches_and_accumulation() -> None:
    tracker = casting([4.0, 2.0] * 2)
    w = variable([1.0, 2.0])
    a, b = branch(unscale(w, tracker), 2, tracker)
    c, d = branch(cast_loss_scaling(a, tracker), 2, tracker)
    loss = loss_scaling(F.sum(c + 2.0 * d) + F.sum(cast_loss_scaling(b, tracker)), tracker)
    np.testing.assert_array_equal(gradients_of(loss, w, clear=True, times=2)[0], [8.0, 8.0])


@pytest.mark.any_context
def test_branches_without_a_tracker_are_added() -> None:
    x = variable(np.ones(3))
    for start in (x, x * 1.0):
        a, b = branch(start, 2)
        loss = F.sum(a * 2.0) + F.sum(b * 3.0)
        loss.forward()
        x.g = 1.0
        loss.backward()
        np.testing.assert_array_equal(x.g, np.full(3, 6.0, np.float32))


# ---- the common scale

U_MAX = 65504.0
scales = st.integers(-20, 40).map(lambda k: 2.0**k)
maxima = st.one_of(st.just(0.0), st.floats(1e-8, U_MAX))


def sum_at(s: float, branches: List[Tuple[float, float]]) -> float:
    return sum(abs_max * (s / scale) for scale, abs_max in branches)


@given(st.lists(st.tuples(scales, maxima), min_size=1, max_size=6))
def test_the_common_scale_is_the_largest_given_one_that_fits(branches: List[Tuple[float, float]]) -> None:
    given_scales = [scale for scale, _ in branches]
    s = common_scale(branches, u_max=U_MAX)
    assert s in given_scales
    slack = 1 + 1e-12
    if s > min(given_scales):
        assert sum_at(s, branches) <= U_MAX * slack
    assert all(sum_at(larger, branches) * slack > U_MAX for larger in given_scales if larger > s)


@pytest.mark.parametrize(
    ("branches", "expected"),
    [
        ([(8.0, 1e9), (8.0, 1e9)], 8.0),
        ([(2.0, 4.0), (8.0, 60000.0), (16.0, 1.0)], 8.0),
        ([(8.0, math.nan), (1024.0, 1.0)], 1024.0),
        ([(8.0, 1.0), (1024.0, math.inf)], 1024.0),
        ([(8.0, U_MAX), (2.0, U_MAX)], 2.0),
        # A sum that reaches u_max has not overflowed.
        ([(8.0, U_MAX / 256), (1024.0, U_MAX / 2)], 1024.0),
    ],
)
def test_common_scales(branches: List[Tuple[float, float]], expected: float) -> None:
    assert common_scale(branches, u_max=U_MAX) == expected
    assert common_scale(branches[::-1], u_max=U_MAX) == expected
