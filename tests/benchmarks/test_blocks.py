# SPDX-License-Identifier: Apache-2.0
"""What is told of times: one dear iteration in eight counts, and a moment in which all is slow does not."""

from __future__ import annotations

from typing import List

import overhead
import planning
import pytest
import training_speed
from blocks import BLOCK, Times, means, ratio, take_turns


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


def test_actions_take_turns_and_each_begins() -> None:
    order: List[str] = []
    taken = take_turns({name: lambda name=name: order.append(name) for name in "abc"}, 2)  # type: ignore[misc]
    assert {name: len(spent) for name, spent in taken.items()} == dict.fromkeys("abc", 2 * BLOCK)
    assert "".join(order[:9]) == "abcbcacab"
    assert len(order) == 3 * (2 * BLOCK + BLOCK // 2)


@pytest.mark.slow
def test_a_small_net_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    for graph in ("static", "reshaped"):
        case = overhead.Case(10, 8, 8, graph, 1)
        found = overhead.measure(case)
        assert found["over_dynamic"]["dynamic"] == 1.0
        assert min(found["ms"].values()) > 0.0  # how long on a busy machine is chance
        assert graph in overhead.row(case, found)
    training_speed.print_training(["demo-lenet"], 1, "float16")
    ratios = capsys.readouterr().out.splitlines()[-1].split()[-6:-4]
    assert all(0.5 < float(ratio) < 3.0 for ratio in ratios)
    microseconds = planning.measure(layers=3, rounds=2)
    assert set(microseconds) == {"plan", "floor", "read", "in half", "read and bind", "of another shape"}
    assert min(microseconds.values()) > 0.0
