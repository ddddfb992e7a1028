# SPDX-License-Identifier: Apache-2.0
"""Schedules in use: how long each is used, what is measured meanwhile, and that their state comes back."""

from __future__ import annotations

import json
from typing import Any, Dict, List, Optional, Tuple

import nnabla as nn
import nnabla.functions as F
import pytest

from nnabla_adaloss.core.schedule import ScaleSchedule
from nnabla_adaloss.core.schedule_cache import ScheduleCache
from tests.core.test_schedule import Graph, affine

pytestmark = pytest.mark.any_context

ONES = 1.0, 1.0, 1.0


def chain() -> Graph:
    h = F.tanh(affine(nn.Variable((4, 3)), "a"))
    return Graph(F.mean(affine(h, "b")), 2.0, 8.0, 32.0)


@pytest.mark.parametrize(
    ("by_layer", "delayed", "given_scale", "held"),
    [
        (True, True, None, [True] * 4 + [False] * 2),
        (True, False, None, [False] + [True] * 3 + [False] * 2),
        (True, True, 8.0, [True] * 4 + [False] * 2),
        # Nothing is measured: neither layers nor S0.
        (False, True, 8.0, [True] * 6),
        (False, True, None, [True] * 4 + [False] * 2),
    ],
)
def test_how_long_a_schedule_is_used(
    by_layer: bool, delayed: bool, given_scale: Any, held: List[bool]
) -> None:
    n = chain()
    cache = ScheduleCache(4, by_layer=by_layer, delayed=delayed)
    assert not cache.entries
    assert cache.current(3, given_scale, ONES) is None
    schedule = n.chosen([2.0, 8.0, 32.0], given_scale)
    cache = cache.keep(schedule, 3)
    found = [cache.current(3 + age, given_scale, ONES) for age in range(6)]
    assert found == [schedule if one else None for one in held]
    # Another S0, or none, or other loss weights: it is chosen anew.
    assert cache.current(4, 16.0, ONES) is None
    assert cache.current(4, None if given_scale else 8.0, ONES) is None
    assert cache.current(4, given_scale, (1.0, 2.0, 2.0)) is None
    cache = cache.drop()
    assert not cache.entries
    assert cache.current(4, given_scale, ONES) is None


def weighted(n: Graph, count: int) -> Dict[Tuple[float, ...], ScaleSchedule]:
    """Schedules for so many loss weights."""
    weights = [(1.0, 2.0**i, 2.0**i) for i in range(count)]
    return {one: n.chosen([2.0, 8.0 / one[1], 32.0 / one[1]], None, one) for one in weights}


def test_loss_weights_that_turn_have_a_schedule_each_and_begin_no_cycle() -> None:
    n = chain()
    cache, schedules = ScheduleCache(4, by_layer=True, delayed=True), weighted(n, 3)
    for age, (weights, schedule) in enumerate(schedules.items()):
        assert cache.current(3 + age, None, weights) is None
        cache = cache.keep(schedule, 3 + age)
        assert cache.slice_number(3 + age) == (3 + age - 3) % 4
    for iteration, held in ((5, True), (6, True), (7, False)):
        for weights, schedule in schedules.items():
            assert cache.current(iteration, None, weights) is (schedule if held else None)
    # With the next cycle all are chosen anew, whatever they are compared with.
    first, second, _ = schedules
    cache = cache.keep(schedules[first], 8)
    for iteration, held in ((8, True), (11, True), (12, False)):
        assert cache.current(iteration, None, first) is (schedules[first] if held else None)
        assert cache.current(iteration, None, second) is None
    assert cache.last(second) is schedules[second]


def test_no_more_schedules_are_kept_than_have_been_used_lately() -> None:
    n = chain()
    cache, schedules = ScheduleCache(99, by_layer=True, delayed=True), weighted(n, 66)
    first = (1.0, 1.0, 1.0)
    for weights, schedule in schedules.items():
        cache = cache.keep(schedule, 0)
        # One that is chosen again is none more, and none that was chosen long ago.
        cache = cache.keep(schedules[first], 0)
        assert cache.last(weights) is schedule
    kept = [weights for weights in schedules if cache.last(weights) is not None]
    assert kept == [first, *list(schedules)[-63:]]


def test_the_last_schedule_moves_with_loss_weights_that_move_alike() -> None:
    n = chain()
    cache, limit = ScheduleCache(4, by_layer=True, delayed=True), 2.0**100
    schedule = n.chosen([2.0, 8.0, 32.0], None, (1.0, 2.0**3, 2.0**4))
    assert cache.convert_latest(ONES, 3, None, limit) is None
    cache = cache.keep(n.schedule, 3)
    cache = cache.keep(schedule, 3)
    # The loss itself, which is a single element, stays.
    moved = cache.convert_latest((1.0, 2.0**-3, 2.0**-2), 4, None, limit)
    assert moved == n.chosen([2.0, 2.0**9, 2.0**11], None, (1.0, 2.0**-3, 2.0**-2))
    # Others have to be chosen, as they have when a cycle has ended.
    assert cache.convert_latest((1.0, 2.0**-3, 2.0**-3), 4, None, limit) is None
    assert cache.convert_latest((1.0, 2.0**-3, 2.0**-2), 7, None, limit) is None
    # A limit of S0 / weight moves likewise, while S0 is the same.
    cache = cache.keep(n.chosen([2.0, 8.0, 32.0], 2.0), 4)
    assert cache.convert_latest((1.0, 2.0, 2.0), 5, None, limit) is None
    assert cache.convert_latest((1.0, 2.0, 2.0), 5, 2.0, limit) == n.chosen(
        [2.0, 4.0, 16.0], 2.0, (1.0, 2.0, 2.0)
    )


@pytest.mark.parametrize(
    ("weights", "scales"),
    [
        ((1.0, 2.0**-5, 0.0), [2.0, 2.0**8, 2.0**10]),
        # Another component is absent, or none is present.
        ((1.0, 0.0, 0.0), None),
        ((1.0, 1.0, 1.0), None),
        # Scales stay in their range.
        ((1.0, 2.0**-15, 0.0), [2.0, 2.0**18, 2.0**20]),
        ((1.0, 2.0**-16, 0.0), None),
        ((1.0, 2.0**103, 0.0), [2.0, 2.0**-100, 2.0**-98]),
        ((1.0, 2.0**104, 0.0), None),
    ],
)
def test_inactive_components_move_with_the_others_and_stay_inactive(
    weights: Tuple[float, ...], scales: Optional[List[float]]
) -> None:
    n = chain()
    schedule = n.chosen([2.0, 8.0, 32.0], None, (1.0, 1.0, 0.0))
    found = schedule.with_loss_weights(weights, 2.0**20)
    assert (None if found is None else found.component_scales) == scales


def test_alphas_stay_around_a_layer_whose_output_is_a_scalar() -> None:
    h = F.tanh(affine(nn.Variable((1, 3)), "trunk"))
    n = Graph(F.mean(affine(h, "a", 1)) + F.mean(affine(h, "b", 1)), 2.0, 2.0, 4.0, 8.0, 32.0)
    assert n.components.names[2:] == ["a/affine", "b/affine", "trunk/affine/Tanh"]
    # The trunk has the larger loss weight of the two heads.
    assert n.schedule.with_loss_weights((1.0, 1.0, 0.5, 1.0, 1.0), 2.0**20) is None
    together = n.schedule.with_loss_weights((1.0, 1.0, 0.5, 0.5, 0.5), 2.0**20)
    assert together is not None
    assert together.component_scales == [2.0, 2.0, 8.0, 16.0, 64.0]
    assert [alpha for _, alpha in together.layers.values()] == [
        alpha for _, alpha in n.schedule.layers.values()
    ]


def test_no_scale_moves_beyond_float32_though_a_policy_allows_it() -> None:
    schedule = chain().chosen([2.0, 8.0, 32.0], None)
    assert schedule.with_loss_weights((1.0, 2.0**-95, 2.0**-95), 2.0**120) is not None
    assert schedule.with_loss_weights((1.0, 2.0**-96, 2.0**-96), 2.0**120) is None


def test_every_iteration_measures_its_slice_and_each_cycle_begins_with_another() -> None:
    n = chain()
    cache = ScheduleCache(3, by_layer=False, delayed=True)
    assert cache.slice_number(0) is None
    cache = cache.keep(n.schedule, 6)
    assert [cache.slice_number(6 + age) for age in range(3)] == [1, 2, 0]
    cache = cache.keep(n.schedule, 9)
    assert [cache.slice_number(9 + age) for age in range(3)] == [0, 1, 2]
    # Nothing, where the iteration that chooses measures at once.
    at_once = ScheduleCache(3, by_layer=True, delayed=False)
    at_once = at_once.keep(n.schedule, 6)
    assert at_once.slice_number(7) is None


def test_a_cycle_goes_on_with_another_topology_until_something_is_dropped() -> None:
    n, none = chain(), ScheduleCache(4, by_layer=True, delayed=True)
    first = none.keep(n.schedule, 5)
    second = none.moved_to_cycle(first.cycle_start)
    assert second.current(6, None, ONES) is None
    second = second.keep(n.schedule, 6)
    assert [second.slice_number(i) for i in (6, 8)] == [first.slice_number(i) for i in (6, 8)]
    assert second.current(9, None, ONES) is None
    second = second.keep(n.schedule, 9)
    assert first.current(8, None, ONES) is n.schedule
    # The network has begun another cycle since.
    assert first.moved_to_cycle(second.cycle_start).current(9, None, ONES) is None
    assert none.moved_to_cycle(second.drop().cycle_start).keep(n.schedule, 10).cycle_start == 10
    # Without slices, each topology is measured by itself.
    at_once = ScheduleCache(4, by_layer=True, delayed=False).keep(n.schedule, 5)
    assert at_once.moved_to_cycle(9) == at_once


@pytest.mark.parametrize("given_scale", [None, 8.0])
@pytest.mark.parametrize("count", [1, 3])
def test_its_state_comes_back(count: int, given_scale: Any) -> None:
    n, there = chain(), chain()
    cache, other = (ScheduleCache(4, by_layer=True, delayed=True) for _ in range(2))
    for age, (weights, one) in enumerate(weighted(n, count).items()):
        cache = cache.keep(n.chosen(one.component_scales, given_scale, weights), 5 + age)
    state = json.loads(json.dumps(cache.state_dict()))
    other = other.with_state(state, there.loaded)
    assert other.state_dict() == state
    for iteration in range(4, 11):
        for weights in weighted(n, count):
            mine, theirs = (one.current(iteration, given_scale, weights) for one in (cache, other))
            assert (mine is None) == (theirs is None) == (not 5 <= iteration < 9)
            assert mine is None or theirs is None or mine.component_scales == theirs.component_scales
        assert cache.slice_number(iteration) == other.slice_number(iteration)
    empty = ScheduleCache(4, by_layer=True, delayed=True)
    other = other.with_state(empty.state_dict(), there.loaded)
    assert other.state_dict() == empty.state_dict()


def saved(*values: Any) -> Dict[str, Any]:
    """A schedule as it is saved."""
    return {**dict(zip(("iteration", "weights", "scales", "fixed_scale"), values)), "joined": False}


@pytest.mark.parametrize("scale", [2.0**-126, 2.0**125])
def test_scales_that_float32_can_divide_by_are_loaded(scale: float) -> None:
    n, cache = chain(), ScheduleCache(4, by_layer=True, delayed=True)
    state = {"since": 0, "chosen": [saved(0, [1.0, 0.0, 1.0], [1.0, scale, 1.0], scale)]}
    cache = cache.with_state(state, n.loaded)
    assert cache.state_dict() == state


@pytest.mark.parametrize("scale", [1e-300, 2.0**-127, 2.0**126, 0.0, -1.0, float("inf"), float("nan"), "8"])
def test_other_scales_are_refused(scale: Any) -> None:
    n, cache = chain(), ScheduleCache(4, by_layer=True, delayed=True)
    cache = cache.keep(n.schedule, 3)
    before = cache.state_dict()
    good = saved(1, [1.0, 2.0, 2.0], [1.0] * 3, None)
    for damaged in (saved(0, ONES, [1.0, 1.0, scale], None), saved(0, ONES, [1.0, 1.0, 1.0], scale)):
        with pytest.raises((TypeError, ValueError)):
            cache.with_state({"since": 0, "chosen": [good, damaged]}, n.loaded)
    assert cache.state_dict() == before
