# SPDX-License-Identifier: Apache-2.0
"""Limits that an overflow lowers and good updates raise again."""

from __future__ import annotations

import math
from typing import List

import hypothesis.strategies as st
import pytest
from hypothesis import given

from nnabla_adaloss.core.layer_limits import LayerLimit, LayerLimits


def test_without_overflows_there_is_no_limit() -> None:
    limits = LayerLimits()
    assert not limits
    assert limits["conv1"] == math.inf
    limits.after_update()
    assert limits.as_mapping() == {}


def test_a_scale_of_one_or_less_is_not_to_blame() -> None:
    limits = LayerLimits()
    assert not limits.back_off("conv1", 1.0)
    assert not limits.back_off("conv1", 0.5)
    assert not limits


def test_backing_off_halves_what_overflowed_and_touches_no_other_layer() -> None:
    limits = LayerLimits()
    assert limits.back_off("conv1", 16.0)
    assert limits["conv1"] == 8.0
    assert limits["conv2"] == math.inf
    assert limits.back_off("conv1", 8.0)
    assert limits["conv1"] == 4.0


def test_a_limit_is_never_below_one() -> None:
    limits = LayerLimits()
    assert limits.back_off("conv1", 1.5)
    assert limits["conv1"] == 1.0


def recovery(limits: LayerLimits, updates: int) -> List[float]:
    found = []
    for _ in range(updates):
        limits.after_update()
        found.append(limits["conv1"])
    return found


def test_limits_double_until_they_end() -> None:
    limits = LayerLimits(recovery_interval=2)
    for alpha in (16.0, 8.0, 4.0):
        limits.back_off("conv1", alpha)
    assert recovery(limits, 7) == [2.0, 4.0, 4.0, 8.0, 8.0, math.inf, math.inf]
    assert not limits


def test_an_overflow_during_recovery_starts_it_anew() -> None:
    limits = LayerLimits(recovery_interval=2)
    limits.back_off("conv1", 16.0)
    limits.back_off("conv1", 8.0)
    limits.after_update()
    limits.back_off("conv1", 4.0)
    assert recovery(limits, 4) == [2.0, 4.0, 4.0, 8.0]


def test_without_growth_of_the_scale_there_is_none_of_limits() -> None:
    limits = LayerLimits(recovery_interval=math.inf)
    limits.back_off("conv1", 16.0)
    assert recovery(limits, 50) == [8.0] * 50


def test_a_copy_goes_on_as_the_original() -> None:
    limits, copy = LayerLimits(3), LayerLimits(3)
    limits.back_off("conv1", 64.0)
    limits.back_off("conv1", 32.0)
    limits.after_update()
    copy.replace(limits.as_mapping())
    assert recovery(copy, 12) == recovery(limits, 12)


@given(
    st.lists(st.none() | st.integers(-2, 20).map(lambda e: 2.0**e), max_size=60),
    st.integers(0, 4),
)
def test_limits_stay_in_range_and_end(events: List[float], interval: int) -> None:
    """Whatever overflows come: a limit is a finite number of 1 or more, and it ends."""
    limits = LayerLimits(interval)
    for alpha in events:
        if alpha is None:
            limits.after_update()
        else:
            limits.back_off("conv1", min(alpha, limits["conv1"]))
        assert limits["conv1"] >= 1.0
        for limit in limits.as_mapping().values():
            assert limit.checked() == limit
            assert limit.limit <= limit.overflowed
    recovery(limits, 22 * max(interval, 1))
    assert not limits


@pytest.mark.parametrize("limit", [(0.5, 2.0, 0), (math.nan, 2.0, 0), (2.0, math.inf, 0), (2.0, 4.0, -1)])
def test_numbers_that_come_from_no_overflow(limit: tuple[float, float, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        LayerLimit(*limit).checked()


def test_an_interval_must_be_a_number() -> None:
    with pytest.raises(TypeError, match="recovery_interval"):
        LayerLimits("often")  # type: ignore[arg-type]
