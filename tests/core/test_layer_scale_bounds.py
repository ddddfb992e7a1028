# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnabla_adaloss.core import AdaLossConfig, bound_loss_scale_by_heuristics, overflow_limit, statistics_of

positive = st.floats(min_value=1e-30, max_value=1e30)


@pytest.mark.parametrize(
    ("scale", "prev_scale", "bounded"),
    [
        (4.0, 1.0, 4.0),
        (100.0, 1.0, 16.0),
        (100.0, 128.0, 8.0),
        (100.0, 4096.0, 1.0),  # min(...) would be 0.25
        (1.0, 4096.0, 1.0),
        (0.125, 1.0, 0.125),  # demanded by overflow
        (0.125, 4096.0, 0.125),
    ],
)
def test_defaults(scale: float, prev_scale: float, bounded: float) -> None:
    result = bound_loss_scale_by_heuristics(scale, config=AdaLossConfig(), prev_scale=prev_scale)
    assert result.shape == ()
    assert float(result) == bounded


@given(positive, positive, positive, positive)
def test_bounds_hold_but_never_turn_a_scale_below_one(
    scale: float, prev_scale: float, upper: float, accumulated: float
) -> None:
    config = AdaLossConfig(scale_upper_bound=upper, accum_upper_bound=accumulated)
    bounded = float(bound_loss_scale_by_heuristics(scale, config=config, prev_scale=prev_scale))
    assert min(scale, 1.0) <= bounded <= scale
    assert bounded <= max(upper, 1.0)
    assert bounded <= max(accumulated / prev_scale, 1.0)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_refused(bad: float) -> None:
    with pytest.raises(ValueError, match=r"prev_scale=.* must be a positive finite number"):
        bound_loss_scale_by_heuristics(2.0, config=AdaLossConfig(), prev_scale=bad)
    with pytest.raises(ValueError, match=r"^scale=.* must be a positive finite number"):
        bound_loss_scale_by_heuristics(bad, config=AdaLossConfig())


@given(st.integers(0, 2**32 - 1), st.integers(-10, 10), st.integers(1, 9))
def test_nothing_overflows_under_the_limit(seed: int, exponent: int, fan_in: int) -> None:
    random = np.random.RandomState(seed)
    g = random.standard_normal((5, fan_in)) * 2.0**exponent
    W = random.standard_normal((fan_in, 4))
    limit = overflow_limit(statistics_of(g), statistics_of(W), fan_in, 65504.0)
    assert np.abs((limit * g) @ W).max() <= 65504.0 * (1 + 1e-12)


def test_the_limit_is_reached_when_all_products_are_the_largest() -> None:
    g, W = statistics_of(np.full((2, 3), -2.0)), statistics_of(np.full((3, 1), 0.5))
    assert overflow_limit(g, W, 3.0, 600.0) == 200.0
    assert overflow_limit(g, None, 3.0, 600.0) == 300.0


@pytest.mark.parametrize("zero", [np.zeros(3), np.zeros(0)])
def test_no_limit_for_zeros(zero: np.ndarray) -> None:
    ones = statistics_of(np.ones(3))
    assert overflow_limit(statistics_of(zero), ones, 3.0, 1.0) == math.inf
    assert overflow_limit(ones, statistics_of(zero), 3.0, 1.0) == math.inf
