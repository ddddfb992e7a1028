# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnabla_adaloss import get_power_of_two_scale
from nnabla_adaloss.core.power_of_two import clamp_scale, is_power_of_two, scale_text

positive = st.floats(min_value=5e-324, max_value=sys.float_info.max)


@given(positive | st.integers(-1074, 1023).map(lambda exponent: math.ldexp(1.0, exponent)))
def test_is_the_largest_power_of_two_below(x: float) -> None:
    result = get_power_of_two_scale(x)
    value = float(result)
    assert result.shape == ()
    assert result.dtype == np.float64
    assert 0.0 < value <= x < math.inf
    assert math.frexp(value)[0] == 0.5
    assert is_power_of_two(value)
    assert is_power_of_two(x) == (value == x)
    assert x / 2 < value or value * 2 == math.inf or x - value < value


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_just_below_a_power_of_two(dtype: Any) -> None:
    below = np.nextafter(dtype(1024), dtype(0))
    assert float(get_power_of_two_scale(below)) == 512.0
    assert float(get_power_of_two_scale(np.array(below))) == 512.0


@pytest.mark.parametrize("x", [0.0, -0.0, -1.0, math.nan, math.inf, -math.inf])
def test_refused(x: float) -> None:
    with pytest.raises(ValueError, match="^scale=.* must be a positive finite number"):
        get_power_of_two_scale(x)


@pytest.mark.parametrize(
    ("scale", "clamped"),
    [(0.0, sys.float_info.min), (math.inf, sys.float_info.max), (5e-324, sys.float_info.min), (3.5, 3.5)],
)
def test_clamp_scale(scale: float, clamped: float) -> None:
    assert clamp_scale(scale) == clamped


@pytest.mark.parametrize("x", [0.0, -1.0, -2.0, 3.0, math.nan, math.inf, -math.inf])
def test_no_power_of_two(x: float) -> None:
    assert not is_power_of_two(x)


def test_scales_for_people() -> None:
    told = {1024.0: "2^10", 32.0: "2^5", 2.0**-20: "2^-20", 1.0: "1", 16.0: "16", 3e5: "300000", 0.3: "0.3"}
    assert {scale: scale_text(scale) for scale in told} == told
