# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import List, Optional

import pytest

from nnabla_adaloss.core.scale_history import HistoryPolicy
from nnabla_adaloss.engine.component_scales import ComponentScales, windows_of
from nnabla_adaloss.graph.components import Components

pytestmark = pytest.mark.any_context

NAMES = ["loss", "a", "b", "c"]
COMPONENTS = Components({}, NAMES, {}, frozenset(), frozenset({"loss"}))


def scales_with(*magnitudes: Optional[float], window: int = 64) -> ComponentScales:
    scales = ComponentScales(HistoryPolicy(window=window), 2.0**10, 2.0**16)
    see(scales, *magnitudes)
    scales.end_iteration()
    return scales


def see(scales: ComponentScales, *magnitudes: Optional[float]) -> None:
    measured = scales.begin(COMPONENTS)
    for index, magnitude in enumerate(magnitudes):
        if magnitude is not None:
            scale = measured.scales[index] or 1.0
            measured.measure(index, magnitude * scale, scale)
    scales.learn(COMPONENTS, measured)


def of_all(scales: ComponentScales) -> List[Optional[float]]:
    return [scales.scale(name) for name in NAMES]


def test_a_scale_follows_from_the_window_and_from_what_this_iteration_has_seen() -> None:
    scales = scales_with(1.0, 1.0, 4.0)
    assert of_all(scales) == [2.0**14, 2.0**8, 2.0**6, None]
    see(scales, 1.0, 8.0, 1.0)
    assert of_all(scales) == [2.0**14, 2.0**5, 2.0**6, None]
    scales.drop_iteration()
    assert of_all(scales) == [2.0**14, 2.0**8, 2.0**6, None]


def test_one_overflow_lowers_one_component_and_the_next_all_behind() -> None:
    scales = scales_with(1.0, 1.0, 1.0, 1.0)
    assert scales.after_overflow("a", 2.0**8)
    assert of_all(scales) == [2.0**14, 2.0**4, 2.0**8, 2.0**8]
    assert scales.after_overflow("b", 2.0**8)
    assert of_all(scales) == [2.0**14, 2.0**4, 2.0**4, 2.0**4]
    # What was lowered only because it is behind has shown nothing.
    scales.end_iteration()
    assert of_all(scales) == [2.0**14, 2.0**6, 2.0**6, 2.0**8]


def test_an_overflow_at_the_floor_is_no_matter_of_the_scale() -> None:
    scales = scales_with(1.0, 1.0)
    assert not scales.after_overflow("a", scales.policy.min_scale)


def test_what_was_large_is_forgotten_after_a_window() -> None:
    scales = scales_with(1.0, 2.0**8, window=3)
    for _ in range(3):
        assert scales.scale("a") == 1.0
        see(scales, 1.0, 1.0)
        scales.end_iteration()
    assert scales.scale("a") == 2.0**8


def test_it_is_settled_when_a_first_look_shows_that_the_scale_would_do() -> None:
    scales = ComponentScales(HistoryPolicy(), 2.0**10)
    see(scales, 2.0**8, 2.0**6)
    assert scales.settled
    see(scales, 2.0**8, 2.0**6, 2.0**5)
    assert not scales.settled
    see(scales, 2.0**8, 2.0**6, 2.0**5, 0.0)
    assert not scales.settled
    see(scales, 2.0**8, 2.0**6, 2.0**5, 0.0)
    assert scales.settled


def test_passes_of_an_iteration_are_counted_and_the_next_one_ends_it() -> None:
    scales = ComponentScales(HistoryPolicy(), 2.0**10)
    assert [scales.begin_pass(7), scales.begin_pass(7)] == [0, 1]
    see(scales, 1.0)
    assert scales.state_dict() == {"loss": [1, [[1, 1.0]]]}
    assert scales.begin_pass(8) == 0
    assert scales.amaxes() == {"loss": 1.0}


def test_what_all_ranks_have_seen_is_taken_for_ones_own() -> None:
    scales = scales_with(1.0, 1.0, 1.0)
    see(scales, 1.0, 2.0)
    assert scales.seen(NAMES) == [1.0, 2.0, -1.0, -1.0]
    scales.adopt(NAMES, [1.0, 8.0, 4.0, -1.0])
    assert of_all(scales) == [2.0**14, 2.0**5, 2.0**6, None]


def test_it_goes_on_from_what_was_saved() -> None:
    scales = scales_with(1.0, 2.0)
    see(scales, 3.0, 1.0)
    other = ComponentScales(HistoryPolicy(), 2.0**10, 2.0**16)
    other.load(windows_of(scales.state_dict()))
    scales.end_iteration()
    assert other.amaxes() == scales.amaxes() == {"loss": 3.0, "a": 2.0}
    other.forget()
    assert other.state_dict() == {}
