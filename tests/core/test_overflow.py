# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from typing import List, Tuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnabla_adaloss.core import common_scale

U_MAX = 65504.0
scales = st.integers(-20, 40).map(lambda k: 2.0**k)
maxima = st.one_of(st.just(0.0), st.floats(1e-8, U_MAX))


def sum_at(s: float, branches: List[Tuple[float, float]]) -> float:
    return sum(abs_max * (s / scale) for scale, abs_max in branches)


@given(st.lists(st.tuples(scales, maxima), min_size=1, max_size=6))
def test_is_the_largest_given_scale_that_fits(branches: List[Tuple[float, float]]) -> None:
    given_scales = [scale for scale, _ in branches]
    s = common_scale(branches, u_max=U_MAX)
    assert s in given_scales
    slack = 1 + 1e-12
    if s > min(given_scales):
        assert sum_at(s, branches) <= U_MAX * slack
    assert all(sum_at(larger, branches) * slack > U_MAX for larger in given_scales if larger > s)


@pytest.mark.parametrize(
    ("branches", "expected"),
    [
        ([(8.0, 1e9)], 8.0),
        ([(8.0, 1e9), (8.0, 1e9)], 8.0),
        ([(8.0, 0.0), (1024.0, 0.0)], 1024.0),
        ([(8.0, 511.0), (1024.0, 0.0)], 1024.0),
        ([(8.0, 512.0), (1024.0, 0.0)], 8.0),
        ([(8.0, 400.0), (1024.0, 15000.0)], 8.0),
        ([(2.0, 4.0), (8.0, 60000.0), (16.0, 1.0)], 8.0),
        ([(8.0, math.nan), (1024.0, 1.0)], 1024.0),
        ([(8.0, 1.0), (1024.0, math.inf)], 1024.0),
        ([(8.0, U_MAX), (2.0, U_MAX)], 2.0),
        # A sum that reaches u_max has not overflowed.
        ([(8.0, U_MAX / 256), (1024.0, U_MAX / 2)], 1024.0),
    ],
)
def test_cases(branches: List[Tuple[float, float]], expected: float) -> None:
    assert common_scale(branches, u_max=U_MAX) == expected
    assert common_scale(branches[::-1], u_max=U_MAX) == expected


def test_no_branch() -> None:
    with pytest.raises(ValueError, match="^branches is empty"):
        common_scale([], u_max=U_MAX)
