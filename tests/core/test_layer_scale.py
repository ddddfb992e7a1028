# SPDX-License-Identifier: Apache-2.0
"""The one decision about a layer's scale: each reason by itself, what wins over what, what is remembered."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, Optional, Tuple

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from nnabla_adaloss.core import (
    AdaLossConfig,
    ArrayStatistics,
    Method,
    Needs,
    Observed,
    Reason,
    decide,
    statistics_of,
)
from nnabla_adaloss.core.layer_scale import NEW_LAYER, LayerState

SMALL = statistics_of(np.array([1e-9, -1e-9]))
WEIGHT = statistics_of(np.array([0.1, -0.1]))
NAN = statistics_of(np.array([np.nan, 1.0]))
FIXED = AdaLossConfig(loss_scale_method="fixed", fixed_loss_scale=64.0, use_bound=False)


def observed(
    g: Optional[ArrayStatistics] = SMALL, weight: Optional[ArrayStatistics] = WEIGHT, **changes: Any
) -> Observed:
    seen = Observed(0, previous_scale=1.0, fan_in=2.0, fan_in_bound=2.0, g=g, weight=weight)
    return seen._replace(**changes)


def ask(config: AdaLossConfig, seen: Observed, *, weight_max: float = math.inf) -> Tuple[float, Reason]:
    alpha, reason, state = decide(NEW_LAYER, seen, config, weight_max=weight_max)
    assert state.alpha == alpha
    return alpha, reason


def test_the_method() -> None:
    assert ask(FIXED, observed()) == (64.0, Reason.METHOD)
    assert ask(dataclasses.replace(FIXED, fixed_loss_scale=100.0), observed()) == (64.0, Reason.METHOD)


def test_the_bounds() -> None:
    config = dataclasses.replace(FIXED, use_bound=True)
    assert ask(config, observed()) == (16.0, Reason.SCALE_BOUND)
    assert ask(config, observed(previous_scale=256.0)) == (4.0, Reason.ACCUMULATED_BOUND)
    assert ask(config, observed(previous_scale=1e6)) == (1.0, Reason.ACCUMULATED_BOUND)
    # What the loss section added does not count.
    assert ask(config, observed(previous_scale=256.0, lift=64.0)) == (16.0, Reason.SCALE_BOUND)


def test_the_overflow_guard() -> None:
    large = statistics_of(np.array([30000.0]))
    assert ask(FIXED, observed(large, statistics_of(np.ones(1)))) == (1.0, Reason.OVERFLOW_GUARD)
    assert ask(FIXED, observed(large, statistics_of(np.ones(1)), fan_in_bound=9.0)) == (
        0.125,
        Reason.OVERFLOW_GUARD,
    )


def test_the_scaled_weight_stays_in_range() -> None:
    seen = observed(SMALL, statistics_of(np.array([3000.0])))
    assert ask(FIXED, seen, weight_max=65504.0) == (16.0, Reason.WEIGHT_RANGE)
    assert ask(FIXED, seen, weight_max=100.0) == (1.0, Reason.WEIGHT_RANGE)
    assert ask(FIXED, seen) == (64.0, Reason.METHOD)
    # What reaches the end of the range is in it.
    assert ask(FIXED, seen, weight_max=64.0 * 3000.0) == (64.0, Reason.METHOD)
    two = dataclasses.replace(FIXED, fixed_loss_scale=2.0)
    assert ask(two, seen, weight_max=3000.0) == (1.0, Reason.WEIGHT_RANGE)
    # A weight that is beyond the range by itself is not the scale's fault.
    one = dataclasses.replace(FIXED, fixed_loss_scale=1.0)
    assert ask(one, seen, weight_max=100.0) == (1.0, Reason.METHOD)


def test_small_scales_are_bounded_too() -> None:
    config = dataclasses.replace(FIXED, use_bound=True, fixed_loss_scale=2.0)
    assert ask(config, observed(previous_scale=1e6)) == (1.0, Reason.ACCUMULATED_BOUND)
    config = dataclasses.replace(config, fixed_loss_scale=1.0)
    assert ask(config, observed(previous_scale=1e6)) == (1.0, Reason.METHOD)


@pytest.mark.parametrize(("g", "weight"), [(NAN, WEIGHT), (SMALL, NAN)])
def test_what_is_not_finite_scales_nothing_and_is_not_remembered(
    g: ArrayStatistics, weight: ArrayStatistics
) -> None:
    state = decide(NEW_LAYER, observed(), FIXED).state
    alpha, reason, after = decide(state, observed(g, weight, iteration=1), FIXED)
    assert (alpha, reason) == (1.0, Reason.NONFINITE)
    assert after == state._replace(alpha=1.0)


def test_the_overflow_limit_is_kept_until_all_that_it_needs_is_seen_again() -> None:
    state = decide(NEW_LAYER, observed(), FIXED).state
    assert state.accumulated_limit < math.inf
    for changes in ({"g": None}, {"weight": None}, {"g": None, "weight": None, "has_weight": False}):
        after = decide(state, observed(iteration=1)._replace(**changes), FIXED).state
        assert after.accumulated_limit == state.accumulated_limit
    alone = observed(weight=None, has_weight=False)
    assert decide(state, alone, FIXED).state.accumulated_limit == 65504.0 / SMALL.abs_max


def test_a_method_without_a_history_is_remembered_none() -> None:
    assert decide(NEW_LAYER, observed(), AdaLossConfig()).state.history == ()


def test_statistics_of_nothing_are_not_remembered() -> None:
    nothing = observed(ArrayStatistics.of_zeros(0), ArrayStatistics.of_zeros(0))
    alpha, reason, state = decide(NEW_LAYER, nothing, AdaLossConfig())
    assert (alpha, reason, state.computed_at) == (1.0, Reason.METHOD, -1)


def test_arrays_must_be_given_to_whom_needs_them() -> None:
    config = AdaLossConfig(loss_scale_method="element_wise_range")
    with pytest.raises(TypeError, match="'element_wise_range' needs arrays"):
        decide(NEW_LAYER, observed(), config)


class LargestOfWindow(Method):
    """What would have kept the largest gradient of the last three iterations at 1."""

    needs = Needs.HISTORY
    window = 3

    def scale(self, g: Any, W: Any, *, range: Any, fan_in: float) -> float:
        seen.append([statistics.abs_max for statistics in g])
        return 1.0 / max(statistics.abs_max for statistics in g)


seen: list[list[float]] = []


def test_a_method_with_a_history() -> None:
    seen.clear()
    config = AdaLossConfig(loss_scale_method=LargestOfWindow, use_bound=False)
    state, alphas = NEW_LAYER, []
    seen_in_turn = [(2.0, 1.0), (0.5, 1.0), (0.25, 4.0), (0.25, 1.0), (0.25, 1.0)]
    for iteration, (magnitude, scale) in enumerate(seen_in_turn):
        known = statistics_of(np.array([magnitude * scale]))
        seen_now = observed(known, iteration=iteration, previous_scale=scale)
        for _ in range(2):  # the passes of one iteration share an answer
            alpha, _, state = decide(state, seen_now, config)
        alphas.append(alpha * scale)
        assert LayerState.from_list(json.loads(json.dumps(state.as_list()))) == state
    assert alphas == [0.5, 0.5, 0.5, 2.0, 4.0]
    # All carry the scale of the present iteration.
    assert seen == [[2.0], [2.0, 0.5], [8.0, 2.0, 1.0], [0.5, 0.25, 0.25], [0.25, 0.25, 0.25]]


magnitudes = st.integers(-40, 15).map(lambda e: 2.0**e)
scales = st.integers(-10, 20).map(lambda e: 2.0**e)


@given(
    magnitudes,
    magnitudes,
    scales,
    st.integers(1, 1000),
    st.sampled_from(["approx_range", "abs_range", "fixed"]),
    st.booleans(),
)
def test_whatever_is_seen_nothing_overflows(
    g: float, w: float, scale: float, fan_in: int, method: str, use_bound: bool
) -> None:
    config = AdaLossConfig(loss_scale_method=method, fixed_loss_scale=2.0**20, use_bound=use_bound)
    known, weight = statistics_of(np.full(4, g)), statistics_of(np.full(4, w))
    seen_now = Observed(0, scale, float(fan_in), float(fan_in), known, weight)
    alpha, reason, _ = decide(NEW_LAYER, seen_now, config, weight_max=65504.0)
    assert math.frexp(alpha)[0] == 0.5
    assert alpha * g * w * fan_in <= 65504.0
    assert alpha <= 1.0 or alpha * w <= 65504.0
    if use_bound:
        assert alpha <= max(1.0, min(16.0, 1024.0 / scale))
    # What only a network knows decides nothing here.
    assert reason in {
        Reason.METHOD,
        Reason.SCALE_BOUND,
        Reason.ACCUMULATED_BOUND,
        Reason.OVERFLOW_GUARD,
        Reason.WEIGHT_RANGE,
    }


def test_a_state_is_saved_in_as_few_numbers_as_it_has() -> None:
    # A limit below 1 is that of gradients near the end of the range.
    state = LayerState(3, 8.0, 0.5, 4.0)
    assert state.as_list() == [3, 8.0, 0.5, 4.0]
    assert LayerState.from_list(state.as_list()) == state
    remembered = state._replace(history=(SMALL,))
    assert remembered.as_list() == [3, 8.0, 0.5, 4.0, [list(SMALL)]]


def test_states_that_came_from_no_layer_are_refused() -> None:
    for values, message in (
        ([0.5, 1.0, math.inf, 1.0], "computed_at=0.5"),
        ([-1, 0.0, math.inf, 1.0], "unbounded=0.0"),
        ([0, 1.0, 0.0, 1.0], "accumulated_limit=0.0 must be positive"),
        ([0, 1.0, "all", 1.0], "accumulated_limit='all'"),
        ([0, 1.0, 1.0, math.nan], "alpha=nan"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            LayerState.from_list(values)
    with pytest.raises(TypeError, match="^history='much'"):
        LayerState.from_list([0, 1.0, 1.0, 1.0, [["much"]]])
