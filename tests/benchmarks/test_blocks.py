# SPDX-License-Identifier: Apache-2.0
"""What is told of times: one dear iteration in eight counts, and a moment in which all is slow does not."""

from __future__ import annotations

from typing import List

import host_time
import overhead
import pytest
import training_speed
from blocks import BLOCK, Times, means, positions, ratio, take_turns


def times(*seconds: float) -> List[Times]:
    return [Times(wall=s, cpu=2.0 * s) for s in seconds]


def with_dear(blocks: int) -> List[Times]:
    """Of eight iterations the second takes five times as long as the others, and all 1.5 on the mean."""
    return times(*([1.0, 5.0] + [1.0] * 6) * 2 * blocks)


def test_a_dear_iteration_in_eight_counts() -> None:
    assert means(with_dear(3), "wall") == [1.5] * 3
    assert means(with_dear(3), "cpu") == [3.0] * 3
    assert ratio({"ours": with_dear(3), "nnabla": times(*[1.0] * 3 * BLOCK)}, "ours", "nnabla", "cpu") == 1.5


def test_a_block_in_which_all_was_slow_does_not() -> None:
    ours, nnabla = with_dear(3), times(*[1.0] * 3 * BLOCK)
    ours[:BLOCK] = times(*[9.0] * BLOCK)
    assert ratio({"ours": ours, "nnabla": nnabla}, "ours", "nnabla", "wall") == 1.5


def test_iterations_of_a_block_are_told_one_by_one() -> None:
    first, second = with_dear(2), with_dear(2)
    second[1 + BLOCK] = Times(7.0, 14.0)
    assert positions(first, "wall")[1] == (5.0, 5.0, 5.0)
    assert positions(second, "wall")[1] == (5.0, 6.0, 7.0)
    assert positions(second, "wall")[2] == (1.0, 1.0, 1.0)
    assert len(positions(second, "wall")) == BLOCK


def test_actions_take_turns_and_each_begins() -> None:
    order: List[str] = []
    taken = take_turns({name: lambda name=name: order.append(name) for name in "abc"}, 2)  # type: ignore[misc]
    assert {name: len(spent) for name, spent in taken.items()} == dict.fromkeys("abc", 2 * BLOCK)
    assert "".join(order[:9]) == "abcbcacab"
    assert len(order) == 3 * (2 * BLOCK + BLOCK // 2)


def test_the_hosts_time_is_a_mean_and_the_kinds_of_iterations_are_beside_it() -> None:
    nnabla, ours = times(*[0.5] * 2 * BLOCK), with_dear(2)
    found = host_time.times_of({"nnabla": nnabla, "adaptive": ours})
    assert found["nnabla_ms"] == 1000.0
    assert found["host_ms"] == 2000.0
    assert found["cheapest_ms"] == 1000.0
    assert found["dearest_over_median"] == 5.0


@pytest.mark.slow
def test_overhead_of_a_small_net() -> None:
    found = overhead.measure(overhead.Case(10, 8, 8, "static", 2))
    over = found["over_dynamic"]
    assert over["dynamic"] == 1.0
    for way in overhead.ADAPTIVE:
        assert found["planned_over_dynamic"][way] < found["measuring_over_dynamic"][way]
    assert "static" in overhead.row(found)


@pytest.mark.slow
def test_host_time_of_a_small_net() -> None:
    with host_time.idle_device() as device:
        found = host_time.measure(device, host_time.Case("ten", host_time.chain(10), (1, 2)), 2)
    assert found["host_ms"] > 0.0
    # One iteration of eight measures, and one chooses.
    assert found["dearest_over_median"] > 1.2


@pytest.mark.slow
def test_training_speed_of_a_small_net() -> None:
    (found,) = training_speed.print_training(["demo-lenet"], 1, "float16")
    assert all(0.5 < found["adaptive_over_dynamic"][clock] < 3.0 for clock in ("wall", "cpu"))
