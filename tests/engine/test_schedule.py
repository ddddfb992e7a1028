# SPDX-License-Identifier: Apache-2.0
"""The scales of a pass as they are applied: every gradient carries that of its component in the end."""

from __future__ import annotations

import json
from typing import Any, List

import hypothesis.strategies as st
import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import pytest

from nnabla_adaloss.engine.schedule import Rescale, ScaleSchedule, ScheduleCache
from tests.engine import random_structures as graphs

pytestmark = pytest.mark.any_context


powers = st.integers(-20, 40).map(lambda e: 2.0**e)


def affine(x: nn.Variable, name: str, width: int = 5) -> nn.Variable:
    return PF.affine(x, width, name=name)


class Graph(graphs.Graph):
    """A graph that never runs, with scales for its components, in their order."""

    def __init__(self, loss: nn.Variable, *scales: float, fixed_scale: Any = None) -> None:
        super().__init__(loss)
        assert len(scales) == len(self.components.names)
        self.schedule = ScaleSchedule(self.structure, self.components, scales, fixed_scale)

    def step(self, label: str) -> Any:
        (node,) = (n for n in self.structure.nodes if n.label == label)
        return self.schedule.steps[node.number]


@pytest.mark.parametrize(("loss_scale", "behind"), [(2.0**14, 2.0**20), (2.0**14, 2.0**10)])
def test_at_a_mean_only_as_much_is_multiplied_before_as_one_element_holds(
    loss_scale: float, behind: float
) -> None:
    y = affine(nn.Variable((4, 3)), "a")
    loss = F.mean(y)
    n = Graph(loss, loss_scale, behind)
    step, factor = n.step("a/affine/Mean"), behind / loss_scale
    root, inner = Rescale(n.position(loss), factor), Rescale(n.position(y), factor)
    assert (step.before, step.after) == (((), (inner,)) if factor > 1.0 else ((root,), ()))
    # A given S0 is lifted before: by no more than the array holds.
    lifted = Graph(loss, loss_scale, behind, fixed_scale=loss_scale).step("a/affine/Mean")
    assert (lifted.before, lifted.after) == ((root,), ())


def test_the_scale_of_the_loss_is_what_was_given_or_what_is_behind_its_functions_of_one_element() -> None:
    loss = F.mean(affine(nn.Variable((4, 3)), "a")) * 0.5
    scales = 2.0**14, 2.0**13, 2.0**20
    assert Graph(loss, *scales).schedule.loss_scale == 2.0**20
    assert Graph(loss, *scales, fixed_scale=2.0**14).schedule.loss_scale == 2.0**14
    several = affine(F.tanh(affine(nn.Variable((4, 3)), "a")), "b")
    assert Graph(several, 8.0, 4.0).schedule.loss_scale == 8.0


# Schedules in use.


def chain() -> Graph:
    h = F.tanh(affine(nn.Variable((4, 3)), "a"))
    return Graph(F.mean(affine(h, "b")), 2.0, 8.0, 32.0)


@pytest.mark.parametrize(
    ("constant", "delayed", "fixed_scale", "held"),
    [
        (False, True, None, [True] * 4 + [False] * 2),
        (False, False, None, [False] + [True] * 3 + [False] * 2),
        (False, True, 8.0, [True] * 4 + [False] * 2),
        # Nothing is measured: neither layers nor S0.
        (True, True, 8.0, [True] * 6),
        (True, True, None, [True] * 4 + [False] * 2),
    ],
)
def test_how_long_a_schedule_is_used(
    constant: bool, delayed: bool, fixed_scale: Any, held: List[bool]
) -> None:
    n = chain()
    cache = ScheduleCache(4, constant=constant, delayed=delayed)
    assert cache.current(3, fixed_scale) is None
    schedule = ScaleSchedule(n.plan.structure, n.components, [2.0, 8.0, 32.0], fixed_scale)
    cache.keep(schedule, 3)
    found = [cache.current(3 + age, fixed_scale) for age in range(6)]
    assert found == [schedule if one else None for one in held]
    # Another S0, or none: it is chosen anew.
    assert cache.current(4, 16.0) is None
    assert cache.current(4, None if fixed_scale else 8.0) is None
    cache.drop()
    assert cache.current(4, fixed_scale) is None


def test_every_iteration_measures_its_share_and_each_cycle_begins_with_another() -> None:
    n = chain()
    cache = ScheduleCache(3, constant=True, delayed=True)
    assert cache.share(0) is None
    cache.keep(n.schedule, 6)
    assert [cache.share(6 + age) for age in range(3)] == [1, 2, 0]
    cache.keep(n.schedule, 9)
    assert [cache.share(9 + age) for age in range(3)] == [0, 1, 2]
    # What is never chosen again is not measured, nor what the iteration that chooses measures at once.
    cache.keep(ScaleSchedule(n.plan.structure, n.components, [8.0] * 3, 8.0), 9)
    assert cache.share(9) is None
    at_once = ScheduleCache(3, constant=False, delayed=False)
    at_once.keep(n.schedule, 6)
    assert at_once.share(7) is None


@pytest.mark.parametrize("fixed_scale", [None, 8.0])
def test_its_state_comes_back(fixed_scale: Any) -> None:
    n, there = chain(), chain()
    cache, other = (ScheduleCache(4, constant=False, delayed=True) for _ in range(2))
    cache.keep(ScaleSchedule(n.plan.structure, n.components, [2.0, 8.0, 32.0], fixed_scale), 5)
    state = json.loads(json.dumps(cache.state_dict()))
    other.load_state_dict(there.plan.structure, there.components, state)
    assert other.state_dict() == state
    for iteration in range(4, 11):
        mine, theirs = cache.current(iteration, fixed_scale), other.current(iteration, fixed_scale)
        assert (mine is None) == (theirs is None)
        assert mine is None or theirs is None or mine.is_applied_as(theirs)
        assert cache.share(iteration) == other.share(iteration)
    assert theirs is None
    empty = ScheduleCache(4, constant=False, delayed=True)
    other.load_state_dict(there.plan.structure, there.components, empty.state_dict())
    assert other.state_dict() == empty.state_dict()
