# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from typing import Any, Dict, List, Optional

import pytest

from nnabla_adaloss.core.scale_history import HistoryPolicy
from nnabla_adaloss.engine.component_scales import ComponentPass, ComponentScales, measured_of
from nnabla_adaloss.graph.components import Components

pytestmark = pytest.mark.any_context

NAMES = ["loss", "a", "b", "c"]
COMPONENTS = Components({}, NAMES, {}, frozenset(), frozenset({"loss"}))


def scales_with(*magnitudes: Optional[float], window: int = 64) -> ComponentScales:
    scales = ComponentScales(HistoryPolicy(window=window), 2.0**10, 2.0**16)
    see(scales, *magnitudes)
    scales.end_iteration()
    return scales


def see(
    scales: ComponentScales, *magnitudes: Optional[float], chosen: bool = True, last: bool = True
) -> None:
    scales.begin_pass(scales.began[0])
    measured = scales.begin(COMPONENTS)
    for index, magnitude in enumerate(magnitudes):
        if magnitude is not None:
            scale = measured.scales[index] or 1.0
            measured.measure([(index, magnitude * scale, scale)])
    scales.learn(COMPONENTS, measured, chosen=chosen, last=last)


def of_all(scales: ComponentScales) -> List[Optional[float]]:
    return [scales.scale(name) for name in NAMES]


def test_a_scale_follows_from_the_window_and_from_what_this_iteration_has_seen() -> None:
    scales = scales_with(1.0, 1.0, 4.0)
    assert of_all(scales) == [2.0**14, 2.0**8, 2.0**6, None]
    see(scales, 1.0, 8.0, 1.0)
    assert of_all(scales) == [2.0**14, 2.0**5, 2.0**6, None]
    scales.drop_iteration()
    assert of_all(scales) == [2.0**14, 2.0**8, 2.0**6, None]


def overflow(scales: ComponentScales, name: str, *used: float) -> bool:
    measured = ComponentPass(COMPONENTS, used)
    measured.overflowed = NAMES.index(name)
    return scales.after_overflow(measured)


def test_one_overflow_lowers_one_component_and_the_next_all_behind() -> None:
    scales = scales_with(1.0, 1.0, 1.0, 1.0)
    assert overflow(scales, "a", 2.0**14, 2.0**8, 2.0**8, 2.0**8)
    assert of_all(scales) == [2.0**14, 2.0**4, 2.0**8, 2.0**8]
    # From the scale that the pass has used, which may be smaller than what there is room for.
    assert overflow(scales, "b", 2.0**14, 2.0**4, 2.0**8, 2.0**6)
    assert of_all(scales) == [2.0**14, 2.0**4, 2.0**4, 2.0**2]
    # What was lowered only because it is behind has shown nothing.
    scales.end_iteration()
    assert of_all(scales) == [2.0**14, 2.0**6, 2.0**6, 2.0**8]


def test_an_overflow_at_the_floor_is_no_matter_of_the_scale() -> None:
    scales = scales_with(1.0, 1.0)
    assert not overflow(scales, "a", 1.0, scales.policy.min_scale, 1.0, 1.0)


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


def test_a_pass_that_measures_nothing_is_settled() -> None:
    scales = scales_with(2.0**8)
    see(scales, 2.0**8, 2.0**5)
    assert not scales.settled
    scales.begin_pass(7)
    assert scales.settled


def test_passes_of_an_iteration_are_counted_and_the_next_one_ends_it() -> None:
    scales = ComponentScales(HistoryPolicy(), 2.0**10)
    assert [scales.begin_pass(7), scales.begin_pass(7)] == [0, 1]
    see(scales, 1.0)
    assert scales.state_dict() == {"windows": {"loss": [1, [[1, 1.0]]]}, "partial": {}}
    assert scales.begin_pass(8) == 0
    assert scales.amaxes() == {"loss": 1.0}


def test_what_all_ranks_have_seen_is_taken_for_ones_own() -> None:
    scales = scales_with(1.0, 1.0, 1.0)
    see(scales, 1.0, 2.0)
    assert scales.shared(NAMES) == [1.0, 1.0, 2.0, -1.0, -1.0]
    scales.adopt(NAMES, [1.0, 1.0, 8.0, 4.0, -1.0])
    assert of_all(scales) == [2.0**14, 2.0**5, 2.0**6, None]


def test_it_goes_on_from_what_was_saved() -> None:
    scales = scales_with(1.0, 2.0)
    see(scales, 3.0, 1.0)
    other = ComponentScales(HistoryPolicy(), 2.0**10, 2.0**16)
    other.load(measured_of(scales.state_dict()))
    scales.end_iteration()
    assert other.amaxes() == scales.amaxes() == {"loss": 3.0, "a": 2.0}
    other.forget()
    assert other.state_dict() == {"windows": {}, "partial": {}}


def one_share(scales: ComponentScales, *magnitudes: Optional[float], last: bool = False) -> None:
    """An iteration that measures a part of what makes an entry."""
    see(scales, *magnitudes, chosen=False, last=last)
    scales.end_iteration()


def windows(scales: ComponentScales) -> Dict[str, List[float]]:
    """All entries, the older ones first; those that no larger one hides."""
    return {n: [v for _, v in w[1]] for n, w in scales.state_dict()["windows"].items()}


def test_the_shares_of_a_cycle_make_one_entry() -> None:
    scales = scales_with(1.0, 1.0, 1.0, 1.0, window=2)
    before = windows(scales)
    one_share(scales, None, 2.0)
    one_share(scales, None, 0.5, 0.25)
    assert windows(scales) == before
    assert scales.state_dict()["partial"] == {"a": 2.0, "b": 0.25}
    # What grows counts at once; what shrinks, when the window has forgotten what was there.
    assert of_all(scales) == [2.0**14, 2.0**7, 2.0**8, 2.0**8]
    one_share(scales, 0.5, None, None, 0.125, last=True)
    assert scales.state_dict()["partial"] == {}
    assert windows(scales) == {"loss": [1.0, 0.5], "a": [2.0], "b": [1.0, 0.25], "c": [1.0, 0.125]}
    for _ in range(2):
        one_share(scales, None, 0.25, 0.25)
        one_share(scales, 0.5, None, None, 0.125, last=True)
    assert of_all(scales) == [2.0**15, 2.0**10, 2.0**10, 2.0**11]


def test_a_window_holds_cycles_and_not_iterations() -> None:
    scales = scales_with(1.0, 2.0**8, window=3)
    for _ in range(2):
        for last in (False, False, True):
            one_share(scales, 1.0, 1.0, last=last)
        assert scales.scale("a") == 1.0
    for last in (False, False, True):
        one_share(scales, 1.0, 1.0, last=last)
    assert scales.scale("a") == 2.0**8


def test_the_batches_of_the_last_iteration_complete_the_cycle_once() -> None:
    scales = scales_with(1.0, 1.0)
    for _ in range(3):
        see(scales, None, 4.0, chosen=False, last=True)
    scales.end_iteration()
    assert scales.state_dict()["windows"]["a"] == [2, [[2, 4.0]]]


def test_an_overflow_in_the_middle_of_a_cycle_is_forgotten_with_its_batch() -> None:
    scales = scales_with(1.0, 1.0)
    one_share(scales, None, 2.0)
    see(scales, None, 2.0**6, chosen=False, last=False)
    assert scales.scale("a") == 2.0**2
    scales.drop_iteration()
    assert scales.scale("a") == 2.0**7
    assert scales.state_dict()["partial"] == {"a": 2.0}


def test_it_goes_on_in_the_middle_of_a_cycle() -> None:
    scales = scales_with(1.0, 1.0, 1.0)
    one_share(scales, None, 2.0)
    see(scales, None, None, 4.0, chosen=False, last=False)
    state = json.loads(json.dumps(scales.state_dict()))
    # The iteration ends with the state, but not for those who go on.
    assert state["partial"] == {"a": 2.0, "b": 4.0}
    assert scales.shared(NAMES) == [0.0, -1.0, -1.0, 4.0, -1.0]
    other = ComponentScales(HistoryPolicy(), 2.0**10, 2.0**16)
    other.load(measured_of(state))
    other.begin(COMPONENTS)
    assert other.has_measured(COMPONENTS)
    scales.end_iteration()
    for one in (scales, other):
        assert of_all(one) == [2.0**14, 2.0**7, 2.0**6, None]
        one_share(one, 0.5, last=True)
    assert other.state_dict() == scales.state_dict()
    assert windows(other) == {"loss": [1.0, 0.5], "a": [2.0], "b": [4.0]}


@pytest.mark.parametrize(
    "damaged",
    [
        {},
        {"windows": {}},
        {"partial": {}},
        {"windows": {}, "partial": {"a": "x"}},
        {"windows": [], "partial": {}},
    ],
)
def test_what_is_no_state_is_refused(damaged: Any) -> None:
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
        measured_of(damaged)


def test_a_share_that_shows_nothing_but_zeros_repeats_no_batch() -> None:
    """Only a pass that chose its scales as it ran has looked at everything."""
    scales = scales_with(1.0, 1.0)
    see(scales, None, None, 0.0, chosen=False, last=False)
    assert scales.settled
    see(scales, None, None, 0.0, chosen=True)
    assert not scales.settled
