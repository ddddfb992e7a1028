# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import math
from collections import deque
from typing import Any, List

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from nnabla_adaloss.core.power_of_two import floor_power_of_two
from nnabla_adaloss.core.scale_history import AmaxWindow, HistoryPolicy

magnitudes = st.one_of(
    st.sampled_from([0.0, 1.0, 2.0]), st.floats(0.0, 1e300), st.floats(0.0, 2.0**-1022, allow_subnormal=True)
)


@given(st.lists(magnitudes, max_size=40), st.integers(1, 9))
def test_a_window_is_the_largest_of_the_last_entries(pushed: List[float], length: int) -> None:
    window, plain = AmaxWindow(), deque(maxlen=length)
    assert window.amax == 0.0
    for magnitude in pushed:
        window = window.push(magnitude, length)
        plain.append(magnitude)
        assert window.amax == max(plain)
        assert len(window.entries) <= length
    assert window.pushed == len(pushed)


@given(st.lists(magnitudes, max_size=20), st.integers(1, 9), st.lists(magnitudes, max_size=9))
def test_a_window_goes_on_from_a_file(pushed: List[float], length: int, later: List[float]) -> None:
    window = AmaxWindow()
    for magnitude in pushed:
        window = window.push(magnitude, length)
    loaded = AmaxWindow.from_list(json.loads(json.dumps(window.as_list())))
    assert loaded == window
    for magnitude in later:
        loaded, window = loaded.push(magnitude, length), window.push(magnitude, length)
    assert loaded == window


@pytest.mark.parametrize(
    "damaged",
    [
        *([], [1], [1, [[1, 0.5]], 3], [-1, []], [5, []], [5, [[3, 1.0]]], [1, [[2, 1.0]]], [1, [[0, 1.0]]]),
        # Not in order.
        *([2, [[1, 1.0], [1, 0.5]]], [2, [[2, 1.0], [1, 0.5]]], [2, [[1, 0.5], [2, 1.0]]]),
        *([2, [[1, 1.0], [2, 1.0]]], [1, [[1, -0.5]]], [1, [[1, math.nan]]], [1, [[1, math.inf]]]),
        # Of another type.
        *([1, [[1, True]]], [1, [[1, "1.0"]]], [1.5, [[1, 1.0]]], [1, [[1.0, 1.0]]], [1, [[1]]]),
        *([1, 1.0], None),
    ],
)
def test_a_damaged_window_is_refused(damaged: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        AmaxWindow.from_list(damaged)


@given(
    st.floats(2.0**-1074, 1e308, allow_subnormal=True),
    st.sampled_from([65504.0, 448.0, 57344.0, 3.3e38]),
    st.floats(1.0, 1e6),
)
def test_scales_are_the_largest_that_leave_the_margin(amax: float, u_max: float, margin: float) -> None:
    policy = HistoryPolicy(margin=margin)
    scale = policy.scale(amax, u_max=u_max)
    assert scale == floor_power_of_two(scale)
    assert policy.min_scale <= scale <= policy.max_scale
    if scale > policy.min_scale:
        assert scale * amax <= u_max / margin * (1.0 + 1e-15)
    if scale < policy.max_scale:
        assert 2.0 * scale * amax > u_max / margin * (1.0 - 1e-15)


def test_a_power_of_two_that_just_fits_is_taken() -> None:
    policy = HistoryPolicy(margin=4.0)
    assert policy.scale(2.0**-3, u_max=2.0**10) == 2.0**11
    assert policy.scale(math.nextafter(2.0**-3, 1.0), u_max=2.0**10) == 2.0**10


@pytest.mark.parametrize(
    ("window", "every", "measurements"),
    [(64, 1, 64), (64, 3, 22), (64, 4, 16), (64, 8, 16), (64, 1000, 16), (256, 8, 32), (8, 1, 8), (8, 8, 8)],
)
def test_a_window_has_16_measurements_at_least(window: int, every: int, measurements: int) -> None:
    policy = HistoryPolicy(margin=2.0, window=window)
    assert policy.measured_every(every) == HistoryPolicy(margin=2.0, window=measurements)


@pytest.mark.parametrize(("amax", "scale"), [(5e-324, 2.0**6), (1e-3, 2.0**6), (1e300, 0.5), (1e4, 0.5)])
def test_the_scale_stays_within_its_bounds(amax: float, scale: float) -> None:
    assert HistoryPolicy(min_scale=0.5, max_scale=2.0**6).scale(amax, u_max=1000.0) == scale


@pytest.mark.parametrize(("margin", "step"), [(1.0, 4.0), (4.0, 16.0), (5.0, 16.0), (16.0, 64.0)])
def test_the_scale_after_an_overflow(margin: float, step: float) -> None:
    policy = HistoryPolicy(margin=margin, min_scale=2.0**-3)
    assert policy.after_overflow(2.0**20) == 2.0**20 / step
    assert policy.after_overflow(0.25) == 2.0**-3
    assert not policy.at_floor(0.25)
    assert policy.at_floor(2.0**-3)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("margin", (0.5, math.nan, "4")),
        ("window", (0, 2.5)),
        ("start_scale", (0.0, math.inf)),
        ("min_scale", (-1.0, 2.0**101)),
        ("max_scale", (math.inf, 2.0**-25)),
    ],
)
def test_arguments_that_make_no_policy(name: str, values: Any) -> None:
    for value in values:
        with pytest.raises((TypeError, ValueError), match=name):
            HistoryPolicy(**{name: value})


@given(st.floats(2.0**-30, 2.0**30))
def test_a_scale_keeps_gradients_down_to_37_bits_below_the_largest_in_float16(amax: float) -> None:
    scale = HistoryPolicy().scale(amax, u_max=65504.0)
    assert np.float16(scale * amax * 2.0**-37) > 0.0
    assert np.isfinite(np.float16(scale * amax))
