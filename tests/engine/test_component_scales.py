# SPDX-License-Identifier: Apache-2.0
"""What was measured of components, and what a next pass has room for."""

from __future__ import annotations

import json
import math
from typing import Any, Callable, Dict, List, Optional, Sequence

import pytest

from nnabla_adaloss.core.scale_history import HistoryPolicy
from nnabla_adaloss.engine.component_scales import ComponentScales
from nnabla_adaloss.engine.report import PassReport
from nnabla_adaloss.engine.schedule import ScaleSchedule
from nnabla_adaloss.graph.components import Components

pytestmark = pytest.mark.any_context

NAMES = ["loss", "a", "b", "c"]
# Each before the next.
NEXT = [{1}, {2}, {3}, set()]
COMPONENTS = Components({}, NAMES, {}, frozenset({"loss"}), NEXT, {}, [], frozenset({0}), 1)


def report(used: Sequence[float], **found: Any) -> PassReport:
    """What a pass with these scales has found."""
    plan: Any = None
    return PassReport(plan, ScaleSchedule(plan, COMPONENTS, used, None), {}, (), (), **found)


def scales_with(*magnitudes: Optional[float], window: int = 64) -> ComponentScales:
    scales = ComponentScales(HistoryPolicy(window=window), 2.0**10, 2.0**16)
    see(scales, *magnitudes)
    scales.end_iteration()
    return scales


def see(
    scales: ComponentScales, *magnitudes: Optional[float], measured_all: bool = False, last: bool = True
) -> None:
    """A pass with the scales there is room for, or else with 1; `last`: an entry of the windows is whole."""
    scales.begin_pass(scales.began[0])
    used = [scale or 1.0 for scale in scales.room(COMPONENTS).room]
    amax = {index: magnitude for index, magnitude in enumerate(magnitudes) if magnitude is not None}
    scales.learn(COMPONENTS, report(used, amax=amax, measured_all=measured_all), last=last)


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
    return scales.after_overflow(COMPONENTS, report(used, overflowed=NAMES.index(name)))


def test_an_overflow_lowers_its_component_and_all_behind() -> None:
    scales = scales_with(1.0, 1.0, 1.0, 1.0)
    assert overflow(scales, "a", 2.0**14, 2.0**8, 2.0**8, 2.0**8)
    assert of_all(scales) == [2.0**14, 2.0**4, 2.0**4, 2.0**4]
    # From the scale that the pass has used, which may be smaller than what there is room for.
    assert overflow(scales, "b", 2.0**14, 2.0**4, 2.0**4, 2.0**2)
    assert of_all(scales) == [2.0**14, 2.0**4, 1.0, 2.0**-2]
    assert scales.limited
    # What nothing is known of follows from what is before it.
    scales = scales_with(1.0, 1.0, 1.0)
    overflow(scales, "a", 2.0**14, 2.0**8, 2.0**8, 2.0**8)
    assert scales.room(COMPONENTS).ceiling == [math.inf, 2.0**4, 2.0**4, math.inf]


@pytest.mark.parametrize("kept", [False, True])
def test_a_finite_pass_over_the_same_batch_replaces_what_was_assumed(kept: bool) -> None:
    scales = scales_with(1.0, 1.0, 1.0, 1.0)
    overflow(scales, "a", 2.0**14, 2.0**8, 2.0**8, 2.0**8)
    see(scales, 1.0, 2.0**4, 2.0, 1.0)
    if kept:
        scales.keep_batch()
        assert not scales.limited
        assert of_all(scales) == [2.0**14, 2.0**4, 2.0**7, 2.0**8]
    scales.end_iteration(good=not kept)
    assert of_all(scales) == [2.0**14, 2.0**4, 2.0**7, 2.0**8]


@pytest.mark.parametrize("end", [ComponentScales.lose_batch, ComponentScales.end_iteration])
def test_of_a_lost_batch_what_was_assumed_stays(end: Callable[[ComponentScales], None]) -> None:
    scales = scales_with(1.0, 1.0, 1.0, 1.0)
    overflow(scales, "a", 2.0**14, 2.0**8, 2.0**8, 2.0**8)
    end(scales)
    assert not scales.limited
    assert of_all(scales) == [2.0**14, 2.0**4, 2.0**4, 2.0**4]
    # The next batch is measured on top of it.
    see(scales, 1.0, 2.0**2, 2.0**2, 2.0**2)
    scales.end_iteration()
    assert of_all(scales) == [2.0**14, 2.0**4, 2.0**4, 2.0**4]
    scales.forget()
    assert of_all(scales) == [None] * 4


def test_what_nothing_was_seen_of_before_an_overflow_is_lowered_with_it() -> None:
    scales = scales_with(1.0, 1.0, 1.0, 1.0)
    used = [2.0**14, 2.0**8, 2.0**8, 2.0**8]
    found = report(used, overflowed=NAMES.index("c"), suspected={NAMES.index("b")})
    assert scales.after_overflow(COMPONENTS, found)
    assert of_all(scales) == [2.0**14, 2.0**8, 2.0**4, 2.0**4]
    # Only what was seen to overflow has shown how large it is.
    assert scales.shared(NAMES)[2:] == [-1.0, -1.0, 2.0**4, 2.0**4]


def test_an_overflow_at_the_floor_is_no_matter_of_the_scale() -> None:
    scales = scales_with(1.0, 1.0)
    assert not overflow(scales, "a", 1.0, scales.policy.min_scale, 1.0, 1.0)


def test_it_is_settled_when_a_first_look_shows_that_the_scale_would_do() -> None:
    scales = ComponentScales(HistoryPolicy(), 2.0**10)
    see(scales, 2.0**8, 2.0**6)
    assert scales.settled
    see(scales, 2.0**8, 2.0**6, 2.0**5)
    assert not scales.settled
    see(scales, 2.0**8, 2.0**6, 0.0, 0.0, measured_all=True)
    assert not scales.settled
    see(scales, 2.0**8, 2.0**6, 0.0, 0.0, measured_all=True)
    assert scales.settled


def test_what_all_ranks_have_seen_is_taken_for_ones_own() -> None:
    scales = scales_with(1.0, 1.0, 1.0)
    see(scales, 1.0, 2.0)
    assert scales.shared(NAMES) == [1.0, 0.0, 1.0, 2.0, -1.0, -1.0]
    scales.adopt(NAMES, [1.0, 0.0, 1.0, 8.0, 4.0, -1.0])
    assert of_all(scales) == [2.0**14, 2.0**5, 2.0**6, None]


def one_share(scales: ComponentScales, *magnitudes: Optional[float], last: bool = False) -> None:
    """An iteration that measures a part of what makes an entry."""
    see(scales, *magnitudes, last=last)
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


def test_it_goes_on_in_the_middle_of_a_cycle() -> None:
    scales = scales_with(1.0, 1.0, 1.0)
    one_share(scales, None, 2.0)
    see(scales, None, None, 4.0, last=False)
    state = json.loads(json.dumps(scales.state_dict()))
    # The iteration ends with the state, but not for those who go on.
    assert state["partial"] == {"a": 2.0, "b": 4.0}
    assert scales.shared(NAMES) == [0.0, 0.0, -1.0, -1.0, 4.0, -1.0]
    other = ComponentScales(HistoryPolicy(), 2.0**10, 2.0**16)
    other.load_state_dict(state)
    other.room(COMPONENTS)
    scales.end_iteration()
    for one in (scales, other):
        assert of_all(one) == [2.0**14, 2.0**7, 2.0**6, None]
        one_share(one, 0.5, last=True)
    assert other.state_dict() == scales.state_dict()
    assert windows(other) == {"loss": [1.0, 0.5], "a": [2.0], "b": [4.0]}


def test_a_share_that_shows_nothing_but_zeros_repeats_no_batch() -> None:
    """Only a pass that measures every gradient has looked at everything."""
    scales = scales_with(1.0, 1.0)
    see(scales, None, None, 0.0, last=False)
    assert scales.settled
    scales = scales_with(1.0, 1.0)
    see(scales, None, None, 0.0, measured_all=True)
    assert not scales.settled


def test_where_backward_leaves_no_array_a_pass_that_measures_everything_has_seen_zeros() -> None:
    scales = ComponentScales(HistoryPolicy(), 2.0**10)
    assert scales.amaxes_of(COMPONENTS) == [None] * 4
    see(scales, 1.0, 2.0)
    # What overflows hides what is behind it.
    found = report([1.0] * 4, measured_all=True, found_inf=["a/affine"], overflowed=1)
    scales.learn(COMPONENTS, found, last=True)
    assert scales.amaxes_of(COMPONENTS) == [1.0, 2.0, None, None]
    see(scales, None, 2.0, measured_all=True)
    assert scales.amaxes_of(COMPONENTS) == [1.0, 2.0, 0.0, 0.0]


def test_after_an_overflow_no_scale_rises_and_none_is_shared() -> None:
    scales = scales_with(1.0, 1.0, 1.0, 1.0)
    overflow(scales, "b", 2.0**14, 2.0**8, 2.0**6, 2.0**7)
    room = scales.room(COMPONENTS)
    assert room.ceiling == [math.inf, math.inf, 2.0**2, 2.0**3]
    assert room.room == [2.0**14, 2.0**8, 2.0**2, 2.0**3]
    assert not room.level
    scales.drop_iteration()
    assert scales.room(COMPONENTS).level


# Batches whose gradients are far smaller than those of the window.


def searched(scales: ComponentScales, *magnitudes: Optional[float]) -> bool:
    """An iteration whose gradients have underflowed; what it shows if it is run with scales of its own."""
    scales.begin_pass(scales.began[0] + 1)
    scales.search(["a"])
    found = scales.searching
    assert scales.settled == (not found)
    if found:
        assert of_all(scales) == [None] * len(NAMES)
        see(scales, *magnitudes)
    scales.end_iteration()
    return found


def test_a_batch_of_tiny_gradients_gets_scales_of_its_own_and_the_window_stays() -> None:
    scales = scales_with(1.0, 1.0, 1.0)
    for count in range(1, 4):
        assert searched(scales, 1.0, 2.0**-40, 2.0**-40)
        assert {window[0] for window in scales.state_dict()["windows"].values()} == {count}
        see(scales, 1.0, 1.0, 1.0)
        scales.end_iteration()
    assert of_all(scales)[:3] == [2.0**14, 2.0**8, 2.0**8]


def test_what_has_never_had_a_gradient_is_not_searched_for_it() -> None:
    scales = scales_with(1.0, 0.0)
    assert not searched(scales)


def test_after_searches_in_vain_twice_as_many_batches_are_left_out() -> None:
    scales = scales_with(1.0, 1.0)
    found = [searched(scales, 1.0, 0.0) for _ in range(18)]
    assert [i for i, one in enumerate(found) if one] == [0, 3, 8, 17]
    # Saved and resumed in between, too.
    other = ComponentScales(HistoryPolicy(), 2.0**10, 2.0**16)
    other.load_state_dict(json.loads(json.dumps(scales.state_dict())))
    assert [searched(other, 1.0, 0.0) for _ in range(17)] == [*16 * [False], True]


def test_where_batch_after_batch_is_searched_it_is_the_window_that_is_out_of_line() -> None:
    scales = scales_with(1.0, 2.0**20)
    for _ in range(3):
        assert searched(scales, 1.0, 1.0)
        assert scales.scale("a") == 2.0**-12
    assert searched(scales, 1.0, 1.0)
    assert scales.scale("a") == 2.0**8


def test_batches_in_turn_are_no_batches_in_a_row() -> None:
    scales = scales_with(1.0, 2.0**20)
    for _ in range(8):
        assert searched(scales, 1.0, 1.0)
        # Nothing is measured in most iterations in between.
        scales.begin_pass(scales.began[0] + 1)
        scales.end_iteration()
        assert scales.scale("a") == 2.0**-12


def searching(scales: ComponentScales, count: int, *, used: float = 8.0, after: float = 1.0) -> List[bool]:
    """Passes over one batch in which component b is zero, though a is not; whether each was settled."""
    settled = []
    for number in range(count):
        scales.begin_pass(0)
        found = {0: 1.0, 1: after, 2: 0.0}
        passed = report([8.0, 8.0, used * 2.0**number, 8.0], amax=found, measured_all=True)
        scales.learn(COMPONENTS, passed, last=True)
        settled.append(scales.settled)
    return settled


def test_what_follows_from_gradients_that_are_not_zero_is_searched_for_a_few_times() -> None:
    """The gradient that arrives at a layer is not zero, and what it hands on is."""
    scales = scales_with(1.0, 1.0)
    assert searching(scales, 8) == [*5 * [False], *3 * [True]]
    # As is told, so that a larger scale is tried.
    assert scales.room(COMPONENTS).tried == [None, None, 8.0 * 2.0**4, None]
    scales.end_iteration()
    assert scales.room(COMPONENTS).tried == [None] * 4
    # It was searched for: in the next batches a single look is enough.
    scales.began = -1, 0
    assert searching(scales, 2, after=0.0) == [True, True]


def test_an_overflow_of_what_was_only_tried_ends_the_search() -> None:
    scales = scales_with(1.0, 1.0)
    searching(scales, 3)
    assert overflow(scales, "b", 8.0, 8.0, 2.0**40, 8.0)
    assert not scales.limited
    assert scales.room(COMPONENTS).tried == [None] * 4
    assert searching(scales, 1) == [True]


def test_a_batch_that_one_rank_has_searched_counts_as_searched_on_all() -> None:
    ranks = [scales_with(1.0, 1.0) for _ in range(2)]
    ranks[0].begin_pass(1)
    ranks[0].search(["a"])
    sent = [rank.shared(NAMES) for rank in ranks]
    for rank in ranks:
        rank.adopt(NAMES, [max(values) for values in zip(*sent)])
        rank.end_iteration()
    assert ranks[0].state_dict() == ranks[1].state_dict()
    assert not any(searched(rank) for rank in ranks)
