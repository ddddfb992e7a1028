# SPDX-License-Identifier: Apache-2.0
"""The published functions, where `test_ada_loss.py` and the tests of methods do not look."""

from __future__ import annotations

import math
from typing import Any, Callable, Optional

import numpy as np
import pytest

from nnabla_adaloss import (
    AdaLossConfig,
    bound_loss_scale_by_heuristics,
    get_loss_scale,
    get_loss_scale_by_approx_range,
)
from nnabla_adaloss.core.methods import METHODS

G, W = np.full((2, 4), 1e-8, np.float16), np.full((4, 3), 0.1, np.float32)
NAN = np.array([[np.nan, 1.0, 1.0, 1.0]])


def constant(value: float) -> Callable[..., float]:
    return lambda g, W, *, config, fan_in: value


def test_the_scale_without_bounds_and_powers_of_two_is_the_methods() -> None:
    config = AdaLossConfig(use_bound=False, power_of_two=False)
    found = get_loss_scale(G, W, config=config, fan_in=4)
    assert found.shape == ()
    assert found == get_loss_scale_by_approx_range(G, W, config=config, fan_in=4)


@pytest.mark.parametrize("method", [*METHODS, constant(8.0)])
@pytest.mark.parametrize(("g", "weight"), [(NAN, W), (G, NAN.T), (NAN, None), (-np.inf * NAN, W)])
def test_nonfinite_gives_one(method: Any, g: np.ndarray, weight: Optional[np.ndarray]) -> None:
    config = AdaLossConfig(loss_scale_method=method, fixed_loss_scale=8.0)
    assert get_loss_scale(g, weight, config=config, fan_in=4) == 1.0


@pytest.mark.parametrize("scale_of", [get_loss_scale_by_approx_range, get_loss_scale])
@pytest.mark.parametrize(("largest", "limit"), [(1e300, 65504e-100), (1e204, 1.0)])
def test_squares_that_overflow_and_underflow_leave_the_limit(
    largest: float, limit: float, scale_of: Any
) -> None:
    config = AdaLossConfig("approx_range", power_of_two=False)
    found = scale_of(np.array([[largest]]), np.array([[1e-200]]), config=config, fan_in=1.0)
    assert float(found) == pytest.approx(limit)


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


def test_bounds_before_the_first_layer_have_nothing_accumulated() -> None:
    config = AdaLossConfig("fixed", fixed_loss_scale=4096.0, scale_upper_bound=2048.0)
    assert bound_loss_scale_by_heuristics(4096.0, config=config) == config.accum_upper_bound == 1024.0
    assert bound_loss_scale_by_heuristics(np.array(2.0), config=config, prev_scale=1e6).shape == ()
    # Where it is called itself, the bounds apply whatever `use_bound` is.
    unused = AdaLossConfig(use_bound=False)
    assert bound_loss_scale_by_heuristics(100.0, config=unused, prev_scale=128.0) == 8.0
    assert get_loss_scale(G, W, config=config, fan_in=4) == 1024.0


def test_the_accumulated_scale_is_that_of_the_gradient_for_any_seed() -> None:
    config = AdaLossConfig("fixed", fixed_loss_scale=4096.0, init_scale=64.0)
    assert get_loss_scale(G, W, config=config, fan_in=4, prev_scale=128.0) == 8.0
