# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from typing import Any

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
def test_is_always_a_positive_finite_power_of_two(
    abs_max: float, count: int, scale: float, start_scale: float, u_max: float, expands: bool
) -> None:
    f = loss_section_factor(abs_max, count, scale, start_scale, expands=expands, u_max=u_max)
    assert 0.0 < f < math.inf
    assert math.frexp(f)[0] == 0.5
    assert 0.0 < f * scale < math.inf


@pytest.mark.parametrize("abs_max", [0.0, math.inf, math.nan])
@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("expands", [True, False])
def test_zero_and_nonfinite_are_left_alone(abs_max: float, count: int, expands: bool) -> None:
    assert loss_section_factor(abs_max, count, 64.0, 8.0, expands=expands, u_max=FP16) == 1.0


@given(st.floats(1e-30, FP16), powers.filter(lambda s: s >= 8.0))
def test_a_scalar_is_lifted_before_a_weight_and_never_lowered(abs_max: float, start_scale: float) -> None:
    f = loss_section_factor(abs_max, 1, start_scale, start_scale, expands=False, u_max=FP16)
    assert 2.0**7 <= abs_max * f < 2.0**8 or (f == 1.0 and abs_max >= 2.0**7)


@given(st.floats(1e-30, 1e30), start_scales, u_maxima, st.booleans())
def test_a_lifted_scalar_has_room(abs_max: float, start_scale: float, u_max: float, expands: bool) -> None:
    f = loss_section_factor(abs_max, 1, start_scale, start_scale, expands=expands, u_max=u_max)
    if f > 1.0:
        assert abs_max * f <= u_max / 4


@given(st.floats(1e-20, 1.0), powers.filter(lambda s: 2.0**-10 <= s <= 2.0**12))
def test_a_loss_weight_leaves_no_trace_where_the_loss_is_spread(weight: float, start_scale: float) -> None:
    lift = loss_section_factor(start_scale, 1, start_scale, start_scale, expands=False, u_max=FP16)
    weighted, scale = start_scale * lift * weight, start_scale * lift
    f = loss_section_factor(weighted, 1, scale, start_scale, expands=True, u_max=FP16)
    assert start_scale / 2 < weighted * f <= start_scale


@given(st.floats(1e-30, 1e30), st.integers(0, 60), powers)
def test_a_spread_scalar_keeps_start_scale(abs_max: float, lift: int, start_scale: float) -> None:
    scale = start_scale * 2.0**lift
    f = loss_section_factor(abs_max, 1, scale, start_scale, expands=True, u_max=FP16)
    assert scale * f >= start_scale


@pytest.mark.parametrize("expands", [True, False])
def test_backing_off_ends_an_overflow_that_the_lift_causes(expands: bool) -> None:
    # A loss multiplied by 1e6: what the scalar becomes must fit in float16 after some backing off.
    policy = ScalePolicy()
    state = policy.initial(8.0)
    for _ in range(30):
        f = loss_section_factor(state.scale, 1, state.scale, state.scale, expands=expands, u_max=FP16)
        if state.scale * f * 1e6 <= FP16:
            return
        state = policy.after_overflow(state)
    pytest.fail("still overflows")


many = st.integers(2, 10**6)


@given(st.floats(1e-30, FP16), many, start_scales, u_maxima, st.booleans())
def test_many_elements_are_raised_to_the_target_and_never_lowered(
    abs_max: float, count: int, start_scale: float, u_max: float, expands: bool
) -> None:
    target = min(start_scale * 2.0**-16, u_max / 8)
    f = loss_section_factor(abs_max, count, start_scale, start_scale, expands=expands, u_max=u_max)
    if abs_max < target:
        assert target <= abs_max * f < 2 * target
    else:
        assert f == 1.0


def test_one_of_several_losses_is_raised_to_what_cannot_hurt_the_others() -> None:
    options: Any = {"expands": True, "u_max": 65504.0}
    small = loss_section_factor(1e-4, 1, 2.0**15, 2.0**15, several=True, **options)
    assert 64.0 < small * 1e-4 <= 128.0
    alone = loss_section_factor(1e-4, 1, 2.0**15, 2.0**15, **options)
    assert 4096.0 < alone * 1e-4 <= 8188.0
    # What is above that already is left, and what is too large is lowered all the same.
    assert loss_section_factor(1000.0, 1, 2.0**15, 2.0**15, several=True, **options) == 1.0
    for several in (False, True):
        assert loss_section_factor(60000.0, 1, 2.0**20, 8.0, several=several, **options) < 1.0


@pytest.mark.parametrize(("u_max", "reached"), [(FP16, 128.0), (448.0, 32.0)])
def test_a_format_with_little_room_lifts_a_scalar_less(u_max: float, reached: float) -> None:
    assert loss_section_factor(8.0, 1, 8.0, 8.0, expands=False, u_max=u_max) * 8.0 == reached


def test_the_smallest_number_there_is_at_a_small_scale() -> None:
    assert loss_section_factor(5e-324, 1, 2.0**-10, 8.0, expands=False, u_max=FP16) == 2.0**1023


def test_what_is_too_large_is_never_raised() -> None:
    # It carries less than start_scale already: lowering it would carry less still.
    assert loss_section_factor(16.0, 1, 4.0, 8.0, expands=True, u_max=FP16) == 1.0


def test_what_is_far_too_large_is_lowered_by_a_number_of_full_precision() -> None:
    assert loss_section_factor(1e308, 1, 1e308, 1e-15, expands=True, u_max=FP16) == 2.0**-1022
