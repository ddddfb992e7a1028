# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import List

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import colormaps

from nnabla_adaloss import Recording
from nnabla_adaloss.report.pieces import Timeline, percent, strip, viridis

from .test_page import layer


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=40))
def test_every_iteration_has_a_column(iterations: List[int]) -> None:
    timeline = Timeline.of(Recording(map(layer, iterations)))
    columns = [timeline.column(i) for i in sorted(iterations)]
    assert columns == sorted(columns)
    assert 0 <= columns[0] <= columns[-1] < timeline.columns <= 240
    assert timeline.ticks()[0] == min(iterations)
    assert timeline.ticks()[-1] == max(iterations)
    assert all(0.0 <= timeline.place(i) <= 1.0 for i in iterations)


@pytest.mark.parametrize("every", [1, 10, 1000])
def test_there_is_a_column_for_each_recorded_iteration_if_there_is_room(every: int) -> None:
    timeline = Timeline.of(Recording(layer(every * i) for i in range(1, 101)))
    assert timeline.columns == 100
    assert [timeline.column(every * i) for i in range(1, 101)] == list(range(100))


def test_the_largest_of_a_column_is_shown() -> None:
    timeline = Timeline(1, 6, 3)
    assert timeline.cells([(1, 7.0), (2, 5.0), (6, 0.0)]) == [7.0, None, 0.0]


def test_it_is_viridis() -> None:
    values = np.linspace(0.0, 1.0, 101)
    found = np.array([tuple(bytes.fromhex(viridis(value)[1:])) for value in values], float)
    expected = np.array(colormaps["viridis"](values))[:, :3] * 255
    assert np.abs(found - expected).max() < 6.0  # it is straight between 17 places


def test_colours_have_edges_and_neighbours_share_one() -> None:
    dark, light = viridis(0.0), viridis(1.0)
    assert strip([0.0, None, 1.0, 1.0]) == (
        f"linear-gradient(90deg,{dark} 0%,{dark} 25%,#0000 25%,#0000 50%,{light} 50%,{light} 100%)"
    )


def test_numbers_for_people() -> None:
    shares = ("12.5 %", "0.9999 %", "0.05 %", "0 %", "< 0.01 %", "not counted")
    assert tuple(map(percent, (0.125, 0.009999, 0.0005, 0.0, 1e-6, None))) == shares
