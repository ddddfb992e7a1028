# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnabla_adaloss.core import FORMATS, ScalePolicy, loss_section_factor

FP16 = 65504.0
any_positive = st.floats(min_value=5e-324, max_value=1e308)
powers = st.integers(-24, 60).map(lambda k: 2.0**k)
start_scales = st.one_of(powers, st.floats(1e-6, 1e15))
u_maxima = st.sampled_from([f.max for f in FORMATS.values()])


@given(any_positive, st.integers(1, 3), any_positive, any_positive, u_maxima, st.booleans())
def test_is_always_a_positive_finite_power_of_two(abs_max, count, scale, start_scale, u_max, expands):
    f = loss_section_factor(abs_max, count, scale, start_scale, u_max=u_max, expands=expands)
    assert 0.0 < f < math.inf
    assert math.frexp(f)[0] == 0.5
    assert 0.0 < f * scale < math.inf


@pytest.mark.parametrize("abs_max", [0.0, math.inf, math.nan])
@pytest.mark.parametrize("count", [1, 8])
def test_zero_and_nonfinite_are_left_alone(abs_max, count):
    assert loss_section_factor(abs_max, count, 64.0, 8.0, u_max=FP16) == 1.0


@given(st.floats(1e-30, FP16), powers.filter(lambda s: s >= 8.0))
def test_a_scalar_is_lifted_into_range_and_never_lowered(abs_max, start_scale):
    f = loss_section_factor(abs_max, 1, start_scale, start_scale, u_max=FP16)
    assert f >= 1.0
    assert 2.0**12 <= abs_max * f < 2.0**13 or (f == 1.0 and abs_max >= 2.0**12)


@given(st.floats(1e-30, FP16), powers.filter(lambda s: s >= 8.0))
def test_a_scalar_that_stays_one_is_lifted_less(abs_max, start_scale):
    f = loss_section_factor(abs_max, 1, start_scale, start_scale, u_max=FP16, expands=False)
    assert 2.0**7 <= abs_max * f < 2.0**8 or (f == 1.0 and abs_max >= 2.0**7)


@given(st.floats(1e-30, 1e30), start_scales, u_maxima, st.booleans())
def test_a_lifted_scalar_has_room(abs_max, start_scale, u_max, expands):
    f = loss_section_factor(abs_max, 1, start_scale, start_scale, u_max=u_max, expands=expands)
    if f > 1.0:
        assert abs_max * f <= u_max / 4


@pytest.mark.parametrize("expands", [True, False])
def test_backing_off_ends_an_overflow_that_the_lift_causes(expands):
    # A loss multiplied by 1e6: what the scalar becomes must fit in float16 after some backing off.
    policy = ScalePolicy()
    state = policy.initial(8.0)
    for _ in range(30):
        f = loss_section_factor(state.scale, 1, state.scale, state.scale, u_max=FP16, expands=expands)
        if state.scale * f * 1e6 <= FP16:
            return
        state = policy.after_overflow(state)
    pytest.fail("still overflows")


many = st.integers(2, 10**6)


@given(st.floats(1e-30, FP16), many, powers, start_scales, u_maxima)
def test_a_small_gradient_is_raised_to_the_target(abs_max, count, lift, start_scale, u_max):
    target = min(start_scale * 2.0**-10, u_max / 8)
    f = loss_section_factor(abs_max, count, start_scale, start_scale, u_max=u_max)
    if abs_max < target:
        assert target <= abs_max * f < 2 * target
    else:
        assert f == 1.0


@given(st.floats(1e-30, 1e30), many, start_scales, st.integers(1, 80))
def test_a_lifted_gradient_is_lowered_only_as_far_as_asked(abs_max, count, start_scale, lift):
    scale = start_scale * 2.0**lift
    f = loss_section_factor(abs_max, count, scale, start_scale, u_max=FP16)
    if abs_max > start_scale:
        assert f <= 1.0
        assert scale * f >= start_scale
        assert abs_max * f > start_scale / 2
        # As low as one of the two limits allows.
        assert abs_max * f <= start_scale or scale * f < 2 * start_scale
    else:
        assert f >= 1.0


@given(st.floats(1e-30, 1e30), many, start_scales)
def test_what_was_not_lifted_is_not_lowered(abs_max, count, start_scale):
    assert loss_section_factor(abs_max, count, start_scale, start_scale, u_max=FP16) >= 1.0


@given(st.floats(1e-20, FP16), many, start_scales)
def test_a_second_time_changes_nothing(abs_max, count, start_scale):
    f = loss_section_factor(abs_max, count, start_scale, start_scale, u_max=FP16)
    assert loss_section_factor(abs_max * f, count, start_scale * f, start_scale, u_max=FP16) == 1.0
