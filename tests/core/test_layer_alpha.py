# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Tuple

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nnabla_adaloss import AdaLossConfig, Reason
from nnabla_adaloss.core.layer_alpha import bounded, unbounded_alpha

positive = st.floats(min_value=1e-30, max_value=1e30)


@example(100.0, 4096.0, 16.0, 1024.0)  # min(...) would be 0.25
@example(0.125, 4096.0, 16.0, 1024.0)  # demanded by overflow
@given(positive, positive, positive, positive)
def test_bounds_hold_but_never_turn_alpha_below_one(
    alpha: float, previous_scale: float, upper: float, accumulated: float
) -> None:
    config = AdaLossConfig(scale_upper_bound=upper, accum_upper_bound=accumulated)
    limit = max(min(upper, accumulated / previous_scale), 1.0)
    assert bounded(alpha, previous_scale, config)[0] == (alpha if alpha <= 1.0 else min(alpha, limit))
    unused = replace(config, use_bound=False)
    assert bounded(alpha, previous_scale, unused) == (alpha, Reason.METHOD)


@pytest.mark.parametrize(
    ("alpha", "previous_scale", "expected"),
    [
        (8.0, 8.0, (8.0, Reason.METHOD)),
        (20.0, 8.0, (16.0, Reason.SCALE_BOUND)),
        (20.0, 128.0, (8.0, Reason.ACCUMULATED_BOUND)),
        (2.0, 1e6, (1.0, Reason.ACCUMULATED_BOUND)),
        (1.0, 1e6, (1.0, Reason.METHOD)),
        (0.5, 1e6, (0.5, Reason.METHOD)),
    ],
)
def test_the_bound_that_decides_is_the_reason(
    alpha: float, previous_scale: float, expected: Tuple[float, Reason]
) -> None:
    assert bounded(alpha, previous_scale, AdaLossConfig()) == expected


def unbounded_by(value: Any) -> float:
    config = AdaLossConfig(lambda g, W, *, config, fan_in: value)
    return unbounded_alpha(config, "a/affine", None, None, config.range, 1.0)


@pytest.mark.parametrize(
    "value",
    [0.0, -1.0, math.nan, math.inf, None, "16", 2.0 + 1.0j, [4.0], np.ones(2), np.array("b")],
    ids=str,
)
def test_a_useless_scale_of_ones_own_method_is_refused(value: Any) -> None:
    said = r"(?s)loss_scale_method=.* returned .* of layer a/affine; .* must be a positive finite number"
    with pytest.raises(ValueError, match=said):
        unbounded_by(value)


@pytest.mark.parametrize("value", [4, np.float32(4.0), np.array(4.0), np.full((1, 1), 4, np.int8)], ids=repr)
def test_a_scale_of_ones_own_method_may_be_of_any_type_of_number(value: Any) -> None:
    assert unbounded_by(value) == 4.0
