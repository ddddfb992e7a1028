# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from typing import Any, Dict, List, Tuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnabla_adaloss.core.scale_policy import ScalePolicy, ScaleState


def baseline(scale: float, factor: float, N: int, overflows: List[bool]) -> List[Tuple[float, int]]:
    """nnabla's own transitions, written as it runs them."""
    counter, history = 0, []
    for overflow in overflows:
        if overflow:
            scale /= factor
            counter = 0
        else:
            if counter > N:
                scale *= factor
                counter = 0
            counter += 1
        history.append((scale, counter))
    return history


@given(
    st.integers(0, 10).map(lambda k: 2.0**k),
    st.sampled_from([2.0, 4.0, 1.5]),
    st.integers(0, 5),
    st.lists(st.booleans(), max_size=30).map(lambda b: b + [False] * 20),
)
def test_is_the_baseline(scale: float, factor: float, N: int, overflows: List[bool]) -> None:
    # At most 30 backoffs: with the floor out of the way, nothing else differs.
    policy = ScalePolicy(scaling_factor=factor, N=N, min_scale=1e-30)
    state, history = policy.initial(scale), []
    for overflow in overflows:
        state = policy.after_overflow(state) if overflow else policy.after_update(state)
        history.append((state.scale, state.counter))
    assert history == baseline(scale, factor, N, overflows)


@given(st.floats(2.0**-126, 1e300), st.lists(st.booleans(), max_size=50), st.floats(1.0, 1e20))
def test_scale_stays_positive_and_finite(scale: float, overflows: List[bool], factor: float) -> None:
    policy = ScalePolicy(scaling_factor=factor, N=0)
    state = policy.initial(scale)
    for overflow in overflows:
        state = policy.after_overflow(state) if overflow else policy.after_update(state)
        assert min(scale, policy.min_scale) <= state.scale <= max(scale, policy.max_scale)


def test_hysteresis_tolerates_single_overflows() -> None:
    policy = ScalePolicy(hysteresis=2)
    state = policy.initial(8.0)
    for _ in range(5):
        state = policy.after_update(policy.after_overflow(state))
    assert state.scale == 8.0
    # One that is tolerated ends the run of good updates all the same.
    assert policy.after_overflow(state) == ScaleState(8.0, 0, 1)
    state = policy.after_overflow(policy.after_overflow(state))
    assert state == ScaleState(4.0, 0, 1)
    assert policy.after_overflow(state).scale == 2.0
    assert policy.after_update(state).hysteresis_left == 2


@pytest.mark.parametrize(
    ("settings", "start", "lowered", "raised"),
    [
        ({"min_scale": 5.0, "max_scale": 10.0}, 8.0, 5.0, 10.0),
        # A start outside of the limits is kept.
        ({"min_scale": 1.0, "max_scale": 2.0}, 0.5, 0.5, 1.0),
        ({"min_scale": 1.0, "max_scale": 2.0}, 8.0, 4.0, 8.0),
        ({"min_scale": 8.0, "max_scale": 8.0}, 8.0, 8.0, 8.0),
        ({"scaling_factor": 1.0}, 8.0, 8.0, 8.0),
        ({"N": math.inf}, 8.0, 4.0, 8.0),
    ],
)
def test_limits(settings: Dict[str, float], start: float, lowered: float, raised: float) -> None:
    policy = ScalePolicy(**{"N": 0, **settings})  # type: ignore[arg-type]
    state = policy.after_overflow(policy.initial(start))
    assert state.scale == lowered
    assert policy.at_floor(state) is (policy.after_overflow(state).scale == lowered)
    assert policy.after_update(ScaleState(start, 10**9, 1)).scale == raised


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scaling_factor": 0.5}, "scaling_factor=0.5 must be 1 or more"),
        ({"N": -1}, "N=-1 must be 0 or more; math.inf never grows the scale$"),
        ({"N": math.nan}, "N=nan"),
        ({"min_scale": 0.0}, "min_scale=0.0"),
        ({"min_scale": 5e-324}, r"min_scale=5e-324 is too small to unscale .* 2\*\*-126 or more"),
        ({"max_scale": math.inf}, "max_scale=inf"),
        ({"min_scale": 2.0, "max_scale": 1.0}, "min_scale=2.0 must not be larger than max_scale=1.0"),
        ({"hysteresis": 0}, "hysteresis=0 must be 1 or more"),
    ],
)
def test_refused(arguments: Dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        ScalePolicy(**arguments)
    for name in arguments:
        with pytest.raises(TypeError, match=f"^{name}='many' must be"):
            ScalePolicy(**{name: "many"})


def test_a_scale_that_float32_cannot_take_away_again_is_refused() -> None:
    with pytest.raises(ValueError, match="scale=inf must be a positive finite number"):
        ScalePolicy().initial(math.inf)
    policy = ScalePolicy(min_scale=2.0**-126)
    assert np.isfinite(np.float32(1.0 / policy.min_scale))
    assert policy.checked(policy.initial(2.0**-126)) == policy.initial(2.0**-126)
    for attempt in (policy.initial, lambda scale: policy.checked(ScaleState(scale, 0, 1))):
        for scale in (2.0**-127, 5e-324):
            with pytest.raises(ValueError, match=f"scale={scale!r} is too small to unscale"):
                attempt(scale)


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ((0.0, 0, 1), ValueError, "scale=0.0 must be a positive"),
        (("much", 0, 1), TypeError, "scale='much' must be a number"),
        ((8.0, -1, 1), ValueError, "counter=-1 must be 0 or more"),
        ((8.0, 0.5, 1), TypeError, "counter=0.5 must be an integer"),
        ((8.0, 0, 0), ValueError, r"hysteresis_left=0 must lie in \[1, 2\]"),
        ((8.0, 0, 3), ValueError, r"hysteresis_left=3 must lie in \[1, 2\]"),
        ((8.0, 0, None), TypeError, "hysteresis_left=None must be an integer"),
    ],
)
def test_invalid_states_are_refused(state: Tuple[Any, Any, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        ScalePolicy(hysteresis=2).checked(ScaleState(*state))


def test_a_loaded_state_has_plain_numbers() -> None:
    state = ScalePolicy(hysteresis=2).checked(ScaleState(np.float32(8.0), np.int64(3), np.int64(2)))
    assert state == (8.0, 3, 2)
    assert [type(value) for value in state] == [float, int, int]
