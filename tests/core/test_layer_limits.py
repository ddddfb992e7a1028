# SPDX-License-Identifier: Apache-2.0
"""Limits that an overflow lowers and good updates raise again."""

from __future__ import annotations

import math
from typing import List, Optional

import hypothesis.strategies as st
import pytest
from hypothesis import given

from nnabla_adaloss.core import LayerLimit, LayerLimitPolicy


class Layer:
    """The limit of one layer through overflows and updates."""

    def __init__(self, recovery_interval: float = 2000, state: Optional[LayerLimit] = None) -> None:
        self.policy = LayerLimitPolicy(recovery_interval)
        self.state = state

    @property
    def limit(self) -> float:
        return math.inf if self.state is None else self.state.limit

    def back_off(self, alpha: float) -> bool:
        after = self.policy.after_overflow(self.state, alpha)
        self.state = self.state if after is None else after
        return after is not None

    def after_update(self) -> None:
        self.state = None if self.state is None else self.policy.after_update(self.state)


def test_a_scale_of_one_or_less_is_not_to_blame() -> None:
    limits = Layer()
    assert not limits.back_off(1.0)
    assert not limits.back_off(0.5)
    assert limits.state is None


def test_backing_off_halves_what_overflowed() -> None:
    limits = Layer()
    assert limits.back_off(16.0)
    assert limits.limit == 8.0
    assert limits.back_off(8.0)
    assert limits.limit == 4.0


def test_a_limit_is_never_below_one() -> None:
    limits = Layer()
    assert limits.back_off(1.5)
    assert limits.limit == 1.0


def recovery(limits: Layer, updates: int) -> List[float]:
    found = []
    for _ in range(updates):
        limits.after_update()
        found.append(limits.limit)
    return found


def test_limits_double_until_they_end() -> None:
    limits = Layer(recovery_interval=2)
    for alpha in (16.0, 8.0, 4.0):
        limits.back_off(alpha)
    assert recovery(limits, 7) == [2.0, 4.0, 4.0, 8.0, 8.0, math.inf, math.inf]
    assert limits.state is None


@pytest.mark.parametrize("interval", [1, 3, 5])
def test_a_limit_doubles_after_as_many_updates_as_the_interval_has(interval: int) -> None:
    limits = Layer(interval)
    for alpha in (16.0, 8.0, 4.0):
        limits.back_off(alpha)
    assert recovery(limits, 2 * interval) == [2.0] * (interval - 1) + [4.0] * interval + [8.0]


def test_a_limit_goes_on_until_the_next_step_would_reach_what_overflowed() -> None:
    assert LayerLimitPolicy(1).after_update(LayerLimit(4.0, 12.0, 0)) == LayerLimit(8.0, 12.0, 0)
    assert LayerLimitPolicy(1).after_update(LayerLimit(4.0, 8.0, 0)) is None


def test_an_overflow_during_recovery_starts_it_anew() -> None:
    limits = Layer(recovery_interval=2)
    limits.back_off(16.0)
    limits.back_off(8.0)
    limits.after_update()
    limits.back_off(4.0)
    assert recovery(limits, 4) == [2.0, 4.0, 4.0, 8.0]


def test_without_growth_of_the_scale_there_is_none_of_limits() -> None:
    limits = Layer(recovery_interval=math.inf)
    limits.back_off(16.0)
    assert recovery(limits, 50) == [8.0] * 50


def test_a_copy_goes_on_as_the_original() -> None:
    limits, copy = Layer(3), Layer(3)
    limits.back_off(64.0)
    limits.back_off(32.0)
    limits.after_update()
    copy.state = limits.state
    assert recovery(copy, 12) == recovery(limits, 12)


@given(
    st.lists(st.none() | st.integers(-2, 20).map(lambda e: 2.0**e), max_size=60),
    st.integers(0, 4),
)
def test_limits_stay_in_range_and_end(events: List[float], interval: int) -> None:
    """Whatever overflows come: a limit is a finite number of 1 or more, and it ends."""
    limits = Layer(interval)
    for alpha in events:
        if alpha is None:
            limits.after_update()
        else:
            limits.back_off(min(alpha, limits.limit))
        assert limits.limit >= 1.0
        if limits.state is not None:
            assert limits.state.checked() == limits.state
            assert limits.limit <= limits.state.overflowed
    recovery(limits, 22 * max(interval, 1))
    assert limits.state is None


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ((0.5, 2.0, 0), "limit=0.5 must be 1 or more"),
        ((math.nan, 2.0, 0), "limit=nan must be a positive"),
        ((2.0, math.inf, 0), "overflowed=inf must be a positive"),
        ((2.0, 4.0, -1), "updates=-1 must be 0 or more"),
    ],
)
def test_numbers_that_come_from_no_overflow(limit: tuple[float, float, int], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        LayerLimit(*limit).checked()
    with pytest.raises(TypeError, match="^updates=0.5 must be an integer"):
        LayerLimit(1.0, 2.0, 0.5).checked()  # type: ignore[arg-type]


def test_an_interval_must_be_a_number() -> None:
    with pytest.raises(TypeError, match="^recovery_interval="):
        LayerLimitPolicy("often")  # type: ignore[arg-type]
