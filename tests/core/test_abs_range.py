# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from typing import Any, List, Optional

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnabla_adaloss.core import AdaLossConfig, get_loss_scale_by_abs_range

CONFIG = AdaLossConfig()


def scale_of(g: Any, W: Optional[np.ndarray], **arguments: Any) -> float:
    result = get_loss_scale_by_abs_range(np.asarray(g), W, config=CONFIG, **arguments)
    assert result.shape == ()
    return float(result)


def test_the_smallest_product_reaches_u_min() -> None:
    g, W = [[0.0, 1e-8, -1e-3]], np.array([[0.5], [-0.25], [0.0]])
    assert math.isclose(scale_of(g, W, fan_in=1) * 1e-8 * 0.25, CONFIG.range[0])
    assert math.isclose(scale_of(g, None) * 1e-8, CONFIG.range[0])
    assert math.isclose(scale_of(g, W, fan_in=3) * 3, scale_of(g, W))


def test_products_below_1e_15_are_not_chased() -> None:
    g, W = [1e-12, 1e-20], np.array([1e-3])
    assert scale_of(g, W, fan_in=1) == CONFIG.range[0] / 1e-15


def test_overflow_goes_below_one() -> None:
    assert math.isclose(scale_of([1e4], np.array([10.0]), fan_in=2), 65504.0 / 2e5)


@pytest.mark.parametrize("g", [[], [0.0, -0.0], [np.nan], [np.inf, 1e-8]])
def test_useless_arrays_give_one(g: List[float]) -> None:
    assert scale_of(g, np.array([1e-8]), fan_in=2) == 1.0
    assert scale_of([1e-8], np.asarray(g), fan_in=2) == 1.0
    assert scale_of(g, None) == 1.0


@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(allow_nan=False, allow_infinity=False))
def test_never_zero_nor_infinite(g: float, W: float) -> None:
    assert 0.0 < scale_of([g], np.array([W]), fan_in=3) < math.inf


def test_fan_in_refused() -> None:
    with pytest.raises(ValueError, match="fan_in=0"):
        scale_of([1.0], np.ones(1), fan_in=0)
