# SPDX-License-Identifier: Apache-2.0
"""Statistics that were put together are those of the arrays put together."""

from __future__ import annotations

import math
from typing import List

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from nnabla_adaloss.core import ArrayStatistics, statistics_of
from nnabla_adaloss.core.statistics import pool

values = st.floats(-1e4, 1e4, width=32) | st.sampled_from([0.0, -0.0, math.inf, math.nan])
parts_of_an_array = st.lists(arrays(np.float32, st.integers(0, 8), elements=values), min_size=1, max_size=4)


def test_every_part_counts() -> None:
    parts = [np.array([1.0, 0.0]), np.array([-8.0, np.nan, 2.0]), np.array([0.25])]
    pooled = ArrayStatistics(
        count=6, sum=-4.75, sum_of_squares=69.0625, abs_max=8.0, abs_min=0.25, zeros=1, nonfinite=1
    )
    assert pool([statistics_of(part) for part in parts]) == pooled
    assert pool([statistics_of(part) for part in reversed(parts)]) == pooled


def test_a_part_of_zeros_does_not_hide_the_smallest_number_of_another() -> None:
    parts = [ArrayStatistics.of_zeros(3), statistics_of(np.array([-0.5, 4.0]))]
    assert pool(parts) == pool(parts[::-1]) == ArrayStatistics(5, 3.5, 16.25, 4.0, 0.5, 3, 0)
    assert pool(parts[:1]) == parts[0]


def test_without_any_part_there_is_nothing_to_tell() -> None:
    assert pool([]) is None


@given(parts_of_an_array)
def test_they_are_those_of_one_array(parts: List[np.ndarray]) -> None:
    pooled, whole = pool([statistics_of(part) for part in parts]), statistics_of(np.concatenate(parts))
    assert pooled is not None
    assert pooled._replace(sum=0.0, sum_of_squares=0.0) == whole._replace(sum=0.0, sum_of_squares=0.0)
    # Rounded in another order.
    magnitudes = math.fsum(abs(float(x)) for part in parts for x in part if np.isfinite(x))
    assert math.isclose(pooled.sum, whole.sum, rel_tol=0.0, abs_tol=1e-12 * magnitudes)
    assert math.isclose(pooled.sum_of_squares, whole.sum_of_squares, rel_tol=1e-12)
