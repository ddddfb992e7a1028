# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from typing import Optional

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from nnabla_adaloss.core.component_scale import component_alpha
from nnabla_adaloss.core.layer_record import Reason
from nnabla_adaloss.core.layer_scale import Constraints
from nnabla_adaloss.core.power_of_two import floor_power_of_two
from nnabla_adaloss.core.statistics import ArrayStatistics, statistics_of

U_MAX = 65504.0


def of(*values: float) -> ArrayStatistics:
    return statistics_of(np.array(values, np.float32))


G, W = of(1.0, -2.0), of(0.5, -0.25)


def alpha(
    wanted: Optional[float],
    *,
    scale: float = 1.0,
    g: ArrayStatistics = G,
    weight: Optional[ArrayStatistics] = W,
    weight_max: float = math.inf,
) -> object:
    return component_alpha(scale, wanted, g, weight, 4.0, U_MAX, Constraints(weight_max=weight_max))


@given(st.integers(-20, 40), st.integers(-20, 40))
def test_it_is_the_ratio_of_two_scales(scale: int, wanted: int) -> None:
    assert alpha(2.0**wanted, scale=2.0**scale) == (2.0 ** (wanted - scale), Reason.METHOD)


def test_a_weight_that_would_leave_its_format_holds_it() -> None:
    assert alpha(64.0, weight_max=8.0) == (16.0, Reason.WEIGHT_RANGE)
    assert alpha(16.0, weight_max=8.0) == (16.0, Reason.METHOD)
    # A weight that is not looked at holds nothing, and one that is too large as it is makes nothing smaller.
    assert alpha(64.0, weight=None, weight_max=8.0) == (64.0, Reason.METHOD)
    assert alpha(64.0, weight_max=0.1) == (1.0, Reason.WEIGHT_RANGE)
    assert alpha(0.25, weight_max=0.1) == (0.25, Reason.METHOD)


@given(st.floats(1e-30, 1e4), st.floats(1e-6, 1e3))
def test_while_nothing_is_known_it_cannot_overflow(g: float, w: float) -> None:
    found, reason = component_alpha(1.0, None, of(g), of(w), 4.0, U_MAX, Constraints())
    assert reason is Reason.OVERFLOW_GUARD
    assert found == floor_power_of_two(found)
    bound = 4.0 * float(np.float32(g)) * float(np.float32(w))
    if bound > 2.0**-60:
        assert found * bound <= U_MAX / 2.0**6


def test_while_nothing_is_known_and_nothing_can_be_told() -> None:
    assert alpha(None, g=of(math.inf)) == (1.0, Reason.NONFINITE)
    assert alpha(None, weight=of(math.nan)) == (1.0, Reason.NONFINITE)
    assert alpha(None, g=of(0.0)) == (1.0, Reason.OVERFLOW_GUARD)
    assert alpha(None, g=ArrayStatistics.of_zeros(0)) == (1.0, Reason.OVERFLOW_GUARD)


@pytest.mark.parametrize("wanted", [None, 2.0**20])
def test_no_weight_leaves_its_format(wanted: Optional[float]) -> None:
    found, _ = component_alpha(1.0, wanted, of(1e-8), of(100.0), 1.0, U_MAX, Constraints(weight_max=U_MAX))
    assert 1.0 <= found <= U_MAX / 100.0
