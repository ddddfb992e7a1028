# SPDX-License-Identifier: Apache-2.0
"""Alphas stay within their bounds; the scaled copy of a weight neither overflows nor loses its bits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Tuple

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nnabla_adaloss import AdaLossConfig, Reason
from nnabla_adaloss.core.formats import BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, FLOAT16, FLOAT32, Format
from nnabla_adaloss.core.layer_alpha import AlphaBounds, alpha_bounds, bound_alpha, spare_of, unbounded_alpha
from nnabla_adaloss.core.power_of_two import is_power_of_two

positive = st.floats(min_value=1e-30, max_value=1e30)


@example(100.0, 4096.0, 16.0, 1024.0)  # min(...) would be 0.25
@example(0.125, 4096.0, 16.0, 1024.0)  # demanded by overflow
@given(positive, positive, positive, positive)
def test_bounds_hold_but_never_turn_alpha_below_one(
    alpha: float, previous_scale: float, upper: float, accumulated: float
) -> None:
    config = AdaLossConfig(scale_upper_bound=upper, accum_upper_bound=accumulated)
    limit = max(min(upper, accumulated / previous_scale), 1.0)
    assert bound_alpha(alpha, previous_scale, config)[0] == (alpha if alpha <= 1.0 else min(alpha, limit))
    unused = replace(config, use_bound=False)
    assert bound_alpha(alpha, previous_scale, unused) == (alpha, Reason.METHOD)


@pytest.mark.parametrize(
    ("alpha", "previous_scale", "expected"),
    [
        (8.0, 8.0, (8.0, Reason.METHOD)),
        (20.0, 8.0, (16.0, Reason.SCALE_BOUND)),
        (16.0, 8.0, (16.0, Reason.METHOD)),
        (8.0, 128.0, (8.0, Reason.METHOD)),
        (20.0, 128.0, (8.0, Reason.ACCUMULATED_BOUND)),
        (2.0, 1e6, (1.0, Reason.ACCUMULATED_BOUND)),
        (1.0, 1e6, (1.0, Reason.METHOD)),
        (0.5, 1e6, (0.5, Reason.METHOD)),
    ],
)
def test_the_bound_that_decides_is_the_reason(
    alpha: float, previous_scale: float, expected: Tuple[float, Reason]
) -> None:
    assert bound_alpha(alpha, previous_scale, AdaLossConfig()) == expected


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


FORMATS = pytest.mark.parametrize("stored", [FLOAT16, BFLOAT16, FLOAT32, FLOAT8_E5M2, FLOAT8_E4M3])


def test_bounds_of_a_weight_in_float16() -> None:
    assert alpha_bounds(0.25, FLOAT16.max, FLOAT16) == (2.0**17, 2.0**-4, 2.0**-18, 2.0**8)
    # A small weight has no more bits itself, and only float32 holds a copy of any size.
    assert alpha_bounds(2.0**-10, FLOAT16.max, FLOAT16) == (2.0**25, 1.0, 2.0**-10, 2.0**8)
    assert alpha_bounds(0.25, FLOAT16.max, None) == (2.0**17, 0.0, 0.0, 1.0)
    assert [spare_of(stored) for stored in (FLOAT16, BFLOAT16, FLOAT8_E5M2)] == [2.0**12] * 3
    # Half the exponents, half of everything.
    assert spare_of(FLOAT8_E4M3) == 2.0**6


def test_layers_with_one_weight_have_the_narrower_of_their_bounds() -> None:
    wide, narrow = AlphaBounds(8.0, 0.25, 0.125), AlphaBounds(4.0, 0.5, 0.0)
    assert wide.intersection(narrow) == narrow.intersection(wide) == (4.0, 0.5, 0.125, 1.0)


@FORMATS
@given(amax=st.floats(1e-30, 1e30))
def test_bounds_are_ordered_powers_of_two_that_keep_their_promise(stored: Format, amax: float) -> None:
    found = alpha_bounds(amax, stored.max, stored)
    assert all(map(is_power_of_two, found))
    assert found.least_for_bits <= 1.0 <= found.highest
    if found.highest > 1.0:
        assert amax * found.highest <= stored.max
    # The largest element keeps a few bits.
    weight = amax * found.least_for_few_bits
    assert abs(stored.nearest(weight) / weight - 1.0) <= 2.0 ** -min(4, stored.mantissa_bits)
    if found.least_for_bits < 1.0:
        # In float16, elements a hundred times smaller are normal numbers.
        assert amax * found.least_for_bits >= min(2.0**7, spare_of(stored) / 8.0) * stored.smallest_normal


@pytest.mark.parametrize("seed", [0, 1])
def test_a_weight_keeps_its_product_at_the_smallest_alpha(seed: int) -> None:
    rng = np.random.RandomState(seed)
    weight, g = rng.randn(64, 32).astype(np.float32), rng.randn(8, 64).astype(np.float32)
    alpha = alpha_bounds(float(abs(weight).max()), FLOAT16.max, FLOAT16).least_for_bits
    copy = (weight * alpha).astype(np.float16).astype(np.float32) / alpha
    error = np.linalg.norm(g @ copy - g @ weight) / np.linalg.norm(g @ weight)
    assert error < 1e-3
