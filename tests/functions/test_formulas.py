# SPDX-License-Identifier: Apache-2.0
"""The published functions, where `test_ada_loss.py` and the tests of methods do not look."""

from __future__ import annotations

import math
from typing import Any, Callable, Optional

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nnabla_adaloss.core import METHODS, AdaLossConfig
from nnabla_adaloss.functions import (
    bound_loss_scale_by_heuristics,
    get_loss_scale,
    get_loss_scale_by_approx_range,
)

G, W = np.full((2, 4), 1e-8, np.float16), np.full((4, 3), 0.1, np.float32)
NAN = np.array([[np.nan, 1.0, 1.0, 1.0]])


def constant(value: float) -> Callable[..., float]:
    return lambda g, W, *, config, fan_in: value


def test_without_bounds_nor_power_of_two_it_is_the_method() -> None:
    config = AdaLossConfig(use_bound=False, power_of_two=False)
    found = get_loss_scale(G, W, config=config, fan_in=4)
    assert found.shape == ()
    assert found == get_loss_scale_by_approx_range(G, W, config=config, fan_in=4)


@pytest.mark.parametrize("method", [*METHODS, constant(8.0)])
@pytest.mark.parametrize(("g", "weight"), [(NAN, W), (G, NAN.T), (NAN, None), (-np.inf * NAN, W)])
def test_nonfinite_gives_one(method: Any, g: np.ndarray, weight: Optional[np.ndarray]) -> None:
    config = AdaLossConfig(loss_scale_method=method, fixed_loss_scale=8.0)
    assert get_loss_scale(g, weight, config=config, fan_in=4) == 1.0


def test_a_method_of_ones_own_gets_the_arrays() -> None:
    seen = []

    def method(g: np.ndarray, W: np.ndarray, *, config: AdaLossConfig, fan_in: float) -> np.float32:
        seen.append((g, W, config, fan_in))
        return np.float32(9.0)

    config = AdaLossConfig(loss_scale_method=method)
    assert get_loss_scale(G, W, config=config, fan_in=4) == 8.0
    ((g, weight, *others),) = seen
    assert g is G
    assert weight is W
    assert others == [config, 4.0]


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_refused(bad: float) -> None:
    config = AdaLossConfig()
    with pytest.raises(ValueError, match="^fan_in="):
        get_loss_scale(G, W, config=config, fan_in=bad)
    with pytest.raises(ValueError, match="^prev_scale="):
        get_loss_scale(G, W, config=config, fan_in=4, prev_scale=bad)
    with pytest.raises(ValueError, match="^prev_scale=.* must be a positive finite number"):
        bound_loss_scale_by_heuristics(2.0, config=config, prev_scale=bad)
    with pytest.raises(ValueError, match="^scale=.* must be a positive finite number"):
        bound_loss_scale_by_heuristics(bad, config=config)


positive = st.floats(min_value=1e-30, max_value=1e30)


@example(100.0, 4096.0, 16.0, 1024.0)  # min(...) would be 0.25
@example(0.125, 4096.0, 16.0, 1024.0)  # demanded by overflow
@given(positive, positive, positive, positive)
def test_bounds_hold_but_never_turn_a_scale_below_one(
    scale: float, prev_scale: float, upper: float, accumulated: float
) -> None:
    config = AdaLossConfig(scale_upper_bound=upper, accum_upper_bound=accumulated)
    bounded = bound_loss_scale_by_heuristics(scale, config=config, prev_scale=prev_scale)
    assert bounded.shape == ()
    assert bounded == (scale if scale <= 1.0 else min(scale, max(min(upper, accumulated / prev_scale), 1.0)))


def test_before_the_first_layer_nothing_is_accumulated() -> None:
    config = AdaLossConfig("fixed", fixed_loss_scale=4096.0, scale_upper_bound=2048.0)
    assert bound_loss_scale_by_heuristics(4096.0, config=config) == config.accum_upper_bound == 1024.0
    assert get_loss_scale(G, W, config=config, fan_in=4) == 1024.0
