# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from typing import Any, Callable, Optional

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnabla_adaloss.core import (
    METHODS,
    AdaLossConfig,
    bound_loss_scale_by_heuristics,
    get_loss_scale,
    get_loss_scale_by_approx_range,
    overflow_limit,
    statistics_of,
)

G, W = np.full((2, 4), 1e-8, np.float16), np.full((4, 3), 0.1, np.float32)
NAN = np.array([[np.nan, 1.0, 1.0, 1.0]])


def constant(value: float) -> Callable[..., float]:
    return lambda g, W, *, config, fan_in: value


@given(
    st.sampled_from(sorted(METHODS)),
    st.integers(0, 2**32 - 1),
    st.integers(-40, 20),
    st.integers(-10, 10),
    st.integers(-5, 15).map(lambda k: 2.0**k),
    st.booleans(),
    st.booleans(),
)
def test_every_method_is_bounded_and_keeps_from_overflow(
    method: str,
    seed: int,
    g_exponent: int,
    w_exponent: int,
    prev_scale: float,
    use_bound: bool,
    with_weight: bool,
) -> None:
    random = np.random.RandomState(seed)
    g = (random.standard_normal((3, 4)) * 2.0**g_exponent).astype(np.float32)
    weight = (random.standard_normal((4, 2)) * 2.0**w_exponent).astype(np.float32) if with_weight else None
    config = AdaLossConfig(loss_scale_method=method, fixed_loss_scale=64.0, use_bound=use_bound)
    result = get_loss_scale(g, weight, config=config, fan_in=4, prev_scale=prev_scale)
    scale = float(result)
    assert result.shape == ()
    assert math.frexp(scale)[0] == 0.5
    w_statistics = None if weight is None else statistics_of(weight)
    limit = overflow_limit(statistics_of(g), w_statistics, 4, 65504.0)
    assert scale <= limit
    assert scale >= min(1.0, limit / 2)
    if use_bound:
        assert scale <= max(1.0, min(16.0, 1024.0 / prev_scale))


def test_without_bounds_nor_power_of_two_it_is_the_method() -> None:
    config = AdaLossConfig(use_bound=False, power_of_two=False)
    assert get_loss_scale(G, W, config=config, fan_in=4) == get_loss_scale_by_approx_range(
        G, W, config=config, fan_in=4
    )


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
    assert seen[0][0] is G
    assert seen[0][1] is W
    assert seen[0][2:] == (config, 4.0)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_useless_scale_of_ones_own_method_is_refused(value: float) -> None:
    config = AdaLossConfig(loss_scale_method=constant(value))
    with pytest.raises(ValueError, match=r"loss_scale_method=.* returned .* must be positive and finite"):
        get_loss_scale(G, W, config=config, fan_in=4)


@pytest.mark.parametrize("bad", [0, -1.0, math.nan, math.inf])
def test_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="^fan_in="):
        get_loss_scale(G, W, config=AdaLossConfig(), fan_in=bad)
    with pytest.raises(ValueError, match="^prev_scale="):
        get_loss_scale(G, W, config=AdaLossConfig(), fan_in=4, prev_scale=bad)


@pytest.mark.parametrize("scale", [2.0**-10, 0.5, 1.0, 1.5, 8.0, 100.0])
@pytest.mark.parametrize("prev_scale", [1.0, 100.0, 700.0, 2048.0])
def test_bounds_turn_no_scale_below_one(scale: float, prev_scale: float) -> None:
    config = AdaLossConfig()
    found = bound_loss_scale_by_heuristics(scale, config=config, prev_scale=prev_scale)
    bound = min(config.scale_upper_bound, config.accum_upper_bound / prev_scale)
    assert found.shape == ()
    assert found == (scale if scale <= 1.0 else min(scale, max(bound, 1.0)))


def test_before_the_first_layer_nothing_is_accumulated() -> None:
    config = AdaLossConfig(scale_upper_bound=2048.0)
    assert bound_loss_scale_by_heuristics(4096.0, config=config) == config.accum_upper_bound == 1024.0
    fixed = AdaLossConfig(loss_scale_method="fixed", fixed_loss_scale=4096.0, scale_upper_bound=2048.0)
    assert get_loss_scale(G, W, config=fixed, fan_in=4) == 1024.0
