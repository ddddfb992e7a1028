# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from typing import Any, Callable, Dict, List, Mapping, Optional

import pytest

from nnabla_adaloss.core.scale_history import HistoryPolicy
from nnabla_adaloss.engine.component_pass import ComponentPass
from nnabla_adaloss.engine.component_scales import ComponentScales, measured_of
from nnabla_adaloss.graph.components import Components

pytestmark = pytest.mark.any_context

NAMES = ["loss", "a", "b", "c"]
# Each before the next.
NEXT = [{1}, {2}, {3}, set()]
COMPONENTS = Components({}, NAMES, {}, frozenset(), frozenset({"loss"}), NEXT, {})


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


def test_an_overflow_lowers_its_component_and_all_behind() -> None:
    scales = scales_with(1.0, 1.0, 1.0, 1.0)
    assert overflow(scales, "a", 2.0**14, 2.0**8, 2.0**8, 2.0**8)
    assert of_all(scales) == [2.0**14, 2.0**4, 2.0**4, 2.0**4]
    # From the scale that the pass has used, which may be smaller than what there is room for.
    assert overflow(scales, "b", 2.0**14, 2.0**4, 2.0**4, 2.0**2)
    assert of_all(scales) == [2.0**14, 2.0**4, 1.0, 2.0**-2]
    assert scales.limited


def test_a_finite_pass_over_the_same_batch_replaces_what_was_assumed() -> None:
    scales = scales_with(1.0, 1.0, 1.0, 1.0)
    overflow(scales, "a", 2.0**14, 2.0**8, 2.0**8, 2.0**8)
    see(scales, 1.0, 2.0**4, 2.0, 1.0)
    scales.keep_batch()
    assert not scales.limited
    assert of_all(scales) == [2.0**14, 2.0**4, 2.0**7, 2.0**8]
    scales.end_iteration()
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


def test_a_bad_batch_leaves_nothing_of_what_was_assumed() -> None:
    scales = scales_with(1.0, 1.0, 1.0, 1.0)
    overflow(scales, "a", 2.0**14, 2.0**8, 2.0**8, 2.0**8)
    scales.drop_iteration()
    assert of_all(scales) == [2.0**14, 2.0**8, 2.0**8, 2.0**8]


def test_what_nothing_was_seen_of_before_an_overflow_is_lowered_with_it() -> None:
    scales = scales_with(1.0, 1.0, 1.0, 1.0)
    measured = ComponentPass(COMPONENTS, [2.0**14, 2.0**8, 2.0**8, 2.0**8])
    measured.overflowed, measured.suspected = NAMES.index("c"), {NAMES.index("b")}
    assert scales.after_overflow(measured)
    assert of_all(scales) == [2.0**14, 2.0**8, 2.0**4, 2.0**4]
    # Only what was seen to overflow has shown how large it is.
    assert scales.shared(NAMES)[2:] == [-1.0, -1.0, 2.0**4, 2.0**4]


def test_what_is_saved_after_a_lost_batch_goes_on_with_the_same_scales() -> None:
    scales = scales_with(1.0, 1.0, 1.0, 1.0)
    overflow(scales, "a", 2.0**14, 2.0**8, 2.0**8, 2.0**8)
    scales.end_iteration()
    other = ComponentScales(HistoryPolicy(), 2.0**10, 2.0**16)
    other.load(measured_of(scales.state_dict()))
    other.begin(COMPONENTS)
    assert of_all(other) == of_all(scales)


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
    see(scales, 2.0**8, 2.0**6, 0.0, 0.0)
    assert not scales.settled
    see(scales, 2.0**8, 2.0**6, 0.0, 0.0)
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
    assert scales.state_dict()["windows"] == {"loss": [1, [[1, 1.0]]]}
    assert scales.begin_pass(8) == 0
    assert scales.amaxes() == {"loss": 1.0}


def test_what_all_ranks_have_seen_is_taken_for_ones_own() -> None:
    scales = scales_with(1.0, 1.0, 1.0)
    see(scales, 1.0, 2.0)
    assert scales.shared(NAMES) == [1.0, 0.0, 1.0, 2.0, -1.0, -1.0]
    scales.adopt(NAMES, [1.0, 0.0, 1.0, 8.0, 4.0, -1.0])
    assert of_all(scales) == [2.0**14, 2.0**5, 2.0**6, None]


def test_it_goes_on_from_what_was_saved() -> None:
    scales = scales_with(1.0, 2.0)
    see(scales, 3.0, 1.0)
    other = ComponentScales(HistoryPolicy(), 2.0**10, 2.0**16)
    other.load(measured_of(scales.state_dict()))
    scales.end_iteration()
    assert other.amaxes() == scales.amaxes() == {"loss": 3.0, "a": 2.0}
    other.forget()
    assert other.state_dict() == {"windows": {}, "partial": {}, "searches": [0, 0, 0, -1]}


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
    assert scales.shared(NAMES) == [0.0, 0.0, -1.0, -1.0, 4.0, -1.0]
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
        {"windows": {}, "partial": {}, "searches": ["x"]},
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
    for _ in range(3):
        assert searched(scales, 1.0, 2.0**-40, 2.0**-40)
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
    other.load(measured_of(json.loads(json.dumps(scales.state_dict()))))
    assert [searched(other, 1.0, 0.0) for _ in range(17)] == [*16 * [False], True]


def test_gradients_that_are_as_large_as_before_are_no_success() -> None:
    scales = scales_with(1.0, 1.0)
    found = [searched(scales, 1.0, 0.5) for _ in range(4)]
    assert found == [True, False, False, True]


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


def chain_pass(*scales: Optional[float], tried: Mapping[str, float]) -> ComponentPass:
    return ComponentPass(COMPONENTS, scales, tried=tried)


def test_what_was_zero_gets_what_arrives_or_far_more() -> None:
    assert chain_pass(8.0, 8.0, None, tried={}).sought(2) is None
    assert chain_pass(8.0, 2.0**30, None, tried={"b": 2.0**10}).sought(2) == 2.0**30
    assert chain_pass(8.0, 2.0**10, None, tried={"b": 2.0**10}).sought(2) == 2.0**34


def test_what_follows_from_gradients_that_are_not_zero_is_searched_for_a_few_times() -> None:
    """The gradient that arrives at a layer is not zero, and what it hands on is."""
    scales = ComponentScales(HistoryPolicy(), 2.0**10, 2.0**16)
    scales.begin_pass(0)
    settled = []
    for _ in range(8):
        measured = scales.begin(COMPONENTS)
        scales.settled = True
        measured.measure([(0, 1.0, 1.0), (1, 1.0, 1.0), (2, 0.0, 1.0)])
        scales.learn(COMPONENTS, measured, chosen=True, last=True)
        settled.append(scales.settled)
    assert settled == [*5 * [False], *3 * [True]]


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
