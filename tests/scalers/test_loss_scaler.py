# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import math
from typing import Any, Callable

import nnabla as nn
import nnabla.functions as F
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnabla_adaloss import AdaptiveLossScaling, LossScaler
from nnabla_adaloss.errors import LossScaleWarning
from tests.imports import modules_looked_for
from tests.worlds.warned import silent, warned

GOOD, BAD = np.ones(2, np.float32), np.array([1.0, np.inf], np.float32)


def feed(scaler, *gradients):
    return [scaler.unscale_gradients_and_check(g.copy()) for g in gradients]


def test_defaults():
    scaler = LossScaler()
    assert scaler.scale == scaler.initial_scale == 65536.0
    assert scaler.dynamic_scaling is True
    assert (scaler.growth_interval, scaler.growth_factor, scaler.backoff_factor) == (2000, 2.0, 0.5)
    assert (scaler.min_scale, scaler.max_scale) == (1.0, 16777216.0)
    assert (scaler.overflow_rate, scaler.skipped_updates, scaler.total_updates) == (0.0, 0, 0)


def test_backs_off_and_grows():
    scaler = LossScaler(initial_scale=8.0, growth_interval=2)
    assert feed(scaler, BAD, GOOD, GOOD, GOOD, BAD, GOOD) == [False, True, True, True, False, True]
    assert scaler.scale == 4.0
    assert (scaler.total_updates, scaler.skipped_updates, scaler.overflow_rate) == (6, 2, 1 / 3)
    feed(scaler, GOOD)
    assert scaler.scale == 8.0
    scaler.dynamic_scaling = False
    feed(scaler, BAD)
    assert (scaler.scale, scaler.skipped_updates) == (8.0, 3)


def test_a_scale_that_was_set_beyond_its_bounds_goes_no_further():
    scaler = LossScaler(growth_interval=1, min_scale=2.0, max_scale=8.0, initial_scale=4.0)
    for beyond, gradient in ((64.0, GOOD), (0.5, BAD)):
        scaler.scale = beyond
        feed(scaler, gradient)
        assert scaler.scale == beyond


@settings(deadline=None)
@given(
    st.lists(st.booleans(), max_size=60),
    st.floats(1.0, 10.0),
    st.floats(0.01, 1.0),
    st.integers(1, 4),
)
def test_scale_grows_and_backs_off_by_its_factors_within_its_limits(overflows, growth, backoff, interval):
    scaler = LossScaler(64.0, True, interval, growth, backoff, min_scale=2.0, max_scale=100.0)
    scale, good = 64.0, 0
    with warned():
        for overflow in overflows:
            assert scaler.unscale_gradients_and_check((BAD if overflow else GOOD).copy()) is not overflow
            good = 0 if overflow else good + 1
            if overflow:
                scale = max(scale * backoff, 2.0)
            elif good == interval:
                scale, good = min(scale * growth, 100.0), 0
            assert scaler.scale == scale
    assert scaler.skipped_updates == sum(overflows)


def test_overflow_at_the_floor_is_told_once():
    scaler = LossScaler(initial_scale=2.0)
    with pytest.warns(LossScaleWarning, match="overflow at min_scale=1: the scale is not the cause") as told:
        feed(scaler, BAD, BAD, BAD, BAD)
    assert len(told) == 1
    assert scaler.scale == 1.0


def test_an_overflow_above_the_floor_is_not_told_as_one_at_it():
    scaler = LossScaler(initial_scale=2.0)
    with silent():
        feed(scaler, BAD)
    assert scaler.scale == 1.0


def test_scale_loss():
    scaler = LossScaler(initial_scale=1024.0)
    assert scaler.scale_loss(2.0) == 2048.0
    assert scaler.scale_loss(np.float32(2.0)) == 2048.0
    half = scaler.scale_loss(np.array(65504.0, np.float16))
    assert half.dtype == np.float32
    assert half == 65504.0 * 1024
    np.testing.assert_array_equal(scaler.scale_loss(nn.NdArray.from_numpy_array(GOOD)).data, GOOD * 1024)
    variable = scaler.scale_loss(nn.Variable.from_numpy_array(GOOD))
    variable.forward()
    np.testing.assert_array_equal(variable.d, GOOD * 1024)
    with pytest.raises(TypeError, match="loss='x' must be a number"):
        scaler.scale_loss("x")


def test_check_replaces_float16_in_the_list():
    scaler = LossScaler(initial_scale=4.0)
    wide, half = np.full(2, 8.0), np.full(2, 2.0**-24, np.float16)
    gradients = [wide, half]
    assert scaler.unscale_gradients_and_check(gradients)
    assert gradients[0] is wide
    assert wide[0] == 2.0
    assert gradients[1].dtype == np.float32
    assert gradients[1][0] == 2.0**-26


def test_check_refuses_paths_that_it_cannot_replace():
    scaler, wide, fixed = LossScaler(initial_scale=4.0), np.full(2, 8.0), np.ones(2, np.float32)
    fixed.flags.writeable = False
    for gradients in ((wide, np.ones(2, np.float16)), np.ones(2, np.float16), (wide, fixed), np.float32(1.0)):
        with pytest.raises(TypeError, match="put the gradients in a list"):
            scaler.unscale_gradients_and_check(gradients)
    assert wide[0] == 8.0
    assert scaler.total_updates == 0


def test_attributes_are_settable_and_checked():
    scaler = LossScaler(growth_interval=3)
    scaler.scale, scaler.growth_interval, scaler.growth_factor = 16, 1, 4
    feed(scaler, GOOD)
    assert scaler.scale == 64.0
    with pytest.raises(ValueError, match="scale=0 must be a positive finite number"):
        scaler.scale = 0
    assert scaler.scale == 64.0
    assert str(scaler) == "LossScaler: dynamic scale 64, 1 updates, 0 skipped (0.0%)"


def test_reset():
    scaler = LossScaler(initial_scale=8.0, growth_interval=2)
    feed(scaler, BAD, GOOD)
    scaler.reset()
    assert (scaler.scale, scaler.total_updates, scaler.skipped_updates) == (8.0, 0, 0)
    feed(scaler, GOOD)
    assert scaler.scale == 8.0
    scaler.reset(32.0)
    assert (scaler.scale, scaler.initial_scale) == (32.0, 32.0)
    with pytest.raises(ValueError, match="initial_scale=-1"):
        scaler.reset(-1.0)
    with pytest.raises(ValueError, match=r"initial_scale=0\.5 must lie between"):
        scaler.reset(0.5)
    assert scaler.scale == 32.0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"initial_scale": math.nan}, ValueError, "initial_scale=nan"),
        ({"initial_scale": 0.5}, ValueError, "initial_scale=0.5 must lie between min_scale=1.0"),
        ({"initial_scale": 2.0**30}, ValueError, "and max_scale=16777216.0"),
        ({"growth_interval": 0}, ValueError, "growth_interval=0 must be 1 or more"),
        ({"growth_factor": 0.5}, ValueError, "growth_factor=0.5 must be 1 or more"),
        ({"backoff_factor": 2.0}, ValueError, "backoff_factor=2.0 must not be larger than 1"),
        ({"min_scale": math.inf}, ValueError, "min_scale=inf"),
        ({"max_scale": -1.0}, ValueError, "max_scale=-1.0"),
    ],
)
def test_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        LossScaler(**arguments)


def test_a_copy_by_its_state_goes_on_as_the_original():
    scaler = LossScaler(8.0, growth_interval=3, growth_factor=4.0)
    feed(scaler, BAD, GOOD, GOOD)
    state = json.loads(json.dumps(scaler.state_dict()))
    copy = LossScaler()
    copy.load_state_dict(state)
    assert copy.state_dict() == state
    for one in (scaler, copy):
        feed(one, GOOD, BAD, GOOD)
    assert copy.state_dict() == scaler.state_dict()
    assert str(copy) == str(scaler)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": -1.0}, "scale=-1.0"),
        ({"good_updates": -1}, "good_updates=-1"),
        ({"total_updates": None}, "total"),
    ],
)
def test_a_state_that_is_none_changes_nothing(changes, message):
    scaler = LossScaler()
    feed(scaler, BAD, GOOD)
    before = scaler.state_dict()
    with pytest.raises((TypeError, ValueError), match=message):
        scaler.load_state_dict({**before, "growth_factor": 8.0, **changes})
    with pytest.raises(ValueError, match="state has no 'scale'"):
        scaler.load_state_dict({name: value for name, value in before.items() if name != "scale"})
    assert scaler.state_dict() == before


def test_a_setting_that_only_one_of_two_versions_has_is_at_its_default_or_refused():
    scaler = LossScaler()
    feed(scaler, BAD, GOOD)
    state = scaler.state_dict()
    older = {name: value for name, value in state.items() if name not in {"max_scale", "chosen"}}
    newer = {**state, "patience": 3}
    (copy := LossScaler()).load_state_dict(older)
    assert copy.state_dict() == state
    copy = LossScaler()
    with pytest.warns(LossScaleWarning, match="has the settings patience: they were at their defaults"):
        copy.load_state_dict(newer)
    assert copy.state_dict() == state
    before = (scaler := LossScaler(max_scale=2.0**20)).state_dict()
    assert before["chosen"] == ["max_scale"]
    for other, told in (
        (older, r"version without max_scale, which is 1048576\.0 here: leave max_scale"),
        ({**newer, "chosen": ["patience"]}, "saved with patience=3, which this version does not know"),
    ):
        with pytest.raises(ValueError, match=told):
            scaler.load_state_dict(other)
    assert scaler.state_dict() == before


def test_gradients_of_adaptive_loss_scaling_are_only_checked():
    x = nn.Variable.from_numpy_array(np.ones((4, 3), np.float32))
    w = nn.Variable.from_numpy_array(np.ones((3, 2), np.float32), need_grad=True)
    loss = F.mean(F.affine(x, w) ** 2)
    scaler, scaling = LossScaler(initial_scale=1024.0), AdaptiveLossScaling(loss)
    with pytest.raises(
        TypeError, match=r"AdaptiveLossScaling, which takes the scale in backward.*check_gradients"
    ):
        scaler.scale_loss(scaling)
    w.grad.zero()
    loss.forward()
    loss.backward()
    expected = w.g.copy()
    w.grad.zero()
    scaling.forward()
    scaling.backward(scaler.scale)
    assert scaler.check_gradients([w])
    np.testing.assert_array_equal(w.g, expected)
    w.g = np.inf
    assert not scaler.check_gradients([w])
    assert (scaler.scale, scaler.total_updates, scaler.skipped_updates) == (512.0, 2, 1)


def nd(values: Any, dtype: Any = np.float32) -> nn.NdArray:
    array = nn.NdArray(np.shape(values))
    array.cast(dtype)[...] = values
    return array


def variable(values: Any, dtype: Any = np.float32) -> nn.Variable:
    v = nn.Variable(np.shape(values), need_grad=True)
    v.grad.cast(dtype)[...] = values
    return v


Maker = Callable[..., Any]
every_maker = pytest.mark.parametrize("make", [np.array, nd, variable])


def values_of(gradient: Any) -> np.ndarray:
    if isinstance(gradient, nn.Variable):
        gradient = gradient.grad
    return gradient.data if isinstance(gradient, nn.NdArray) else gradient


@every_maker
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_division_is_in_float32_or_float64_and_where_nnablas_arrays_stand(make: Maker, dtype: Any) -> None:
    wide = np.float64 if dtype is np.float64 else np.float32
    stored = np.array([2.0**-24, -0.0, 3.0, 65504.0], dtype)
    gradient = make(stored, dtype=dtype)
    result = LossScaler(3.0).unscale_gradient(gradient)
    assert values_of(result).dtype == wide
    np.testing.assert_array_equal(values_of(result), stored.astype(wide) / wide(3.0))
    assert np.signbit(values_of(result)[1])
    assert (result is gradient) == (make is not np.array)
    if make is np.array:
        np.testing.assert_array_equal(gradient, stored)


def test_a_lazily_zero_gradient_stays_lazily_zero() -> None:
    gradient, scaler = nd([1.0]), LossScaler(2.0)
    gradient.zero()
    assert scaler.unscale_gradients_and_check(gradient)
    assert scaler.scale == 2.0
    assert gradient.zeroing


def test_the_data_of_a_variable_is_not_touched() -> None:
    v = variable([2.0])
    v.d = 8.0
    LossScaler(2.0).unscale_gradient(v)
    assert (v.d[0], v.g[0]) == (8.0, 1.0)


@every_maker
@pytest.mark.parametrize(
    ("values", "expected"),
    [([1.0, np.nan], True), ([-np.inf, 1.0], True), ([65504.0, 0.0], False), (np.zeros((0, 2)), False)],
)
def test_infinities_and_nans_are_found(make: Maker, values: Any, expected: bool) -> None:
    assert LossScaler().has_overflow(make(values, dtype=np.float32)) is expected
    assert LossScaler().detect_overflow([nd([1.0]), make(values, dtype=np.float32)]) is expected


@pytest.mark.parametrize(
    ("gradients", "error", "message"),
    [
        ([], ValueError, "gradients is empty"),
        (None, TypeError, "gradients=None must be"),
        (3.0, TypeError, "gradients=3.0 must be"),
        ([np.ones(1), None], TypeError, r"gradients\[1\] is of type NoneType"),
        ([np.ones(1, np.int32)], TypeError, r"gradients\[0\] is of dtype int32"),
        (nn.Variable((1,), need_grad=True), ValueError, r"gradients\[0\] holds nothing yet: run backward"),
        ([np.ones(1), nn.Variable((1,))], ValueError, r"gradients\[1\] holds nothing yet"),
    ],
)
def test_refusals_leave_everything_unchanged(gradients: Any, error: Any, message: str) -> None:
    scaler = LossScaler()
    for method in (scaler.unscale_gradients, scaler.unscale_gradients_and_check, scaler.detect_overflow):
        with pytest.raises(error, match=message):
            method(gradients)
    if isinstance(gradients, list) and len(gradients) == 2:
        np.testing.assert_array_equal(gradients[0], 1.0)
    assert scaler.total_updates == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_nnabla_arrays_are_read_where_they_are(dtype: Any) -> None:
    gradient = nn.NdArray.from_numpy_array(np.array([[2.0, -4.0]], dtype))
    with modules_looked_for() as looked_for:
        assert LossScaler(2.0).unscale_gradients_and_check(gradient)
    assert not looked_for
