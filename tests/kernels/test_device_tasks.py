# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import List, Tuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnabla_adaloss.kernels.device_tasks import DeviceTasks

addresses = st.integers(0, 12)


def tasks(pairs: List[Tuple[int, int]]) -> DeviceTasks:
    sources, targets = [s for s, _ in pairs], [t for _, t in pairs]
    return DeviceTasks(sources, targets, 7, rows=range(len(pairs)))


@given(pairs=st.lists(st.tuples(addresses, addresses), max_size=12), longest=st.integers(1, 5))
def test_no_task_of_a_launch_reads_or_writes_anothers_output(
    pairs: List[Tuple[int, int]], longest: int
) -> None:
    parts = list(tasks(pairs).launches(longest))
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(len(pairs)))
    for part in parts:
        group = pairs[part]
        assert 0 < len(group) <= longest
        for index, (_, target) in enumerate(group):
            others = group[:index] + group[index + 1 :]
            assert not target or all(target not in other for other in others)


@pytest.mark.parametrize(
    "pairs",
    [
        [(i, 0) for i in range(1, 9)],
        [(i, i) for i in range(1, 9)],
        [(i, i + 8) for i in range(1, 9)],
        [(1, i + 8) for i in range(1, 9)],
    ],
    ids=["reading", "in place", "copies", "copies of one"],
)
def test_tasks_share_a_launch_up_to_its_limit(pairs: List[Tuple[int, int]]) -> None:
    assert list(tasks(pairs).launches(5)) == [slice(0, 5), slice(5, 8)]
    assert list(tasks([]).launches(5)) == []


def test_independent_tasks_share_launches() -> None:
    # Not so in truth: it is the word of who knows that counts.
    assert list(DeviceTasks([1, 2], [2, 1], 3, independent=True).launches(5)) == [slice(0, 2)]


def test_tasks_that_are_moved_are_launched_as_new_ones() -> None:
    sizes, factors = [1, 5000, 0, 70, 3 * 10**6], [1.0, 2.0, 0.5, 4.0, 8.0]
    first, second = range(16, 96, 16), range(116, 196, 16)
    moved = DeviceTasks(first, first, sizes, rows=range(5), factors=factors, flags=1, independent=True)
    for sources, targets, flags in ((first, first, 1), (second, first, [0, 1, 2, 3, 0]), (first, second, 0)):
        moved.move(sources, targets, flags)
        new = DeviceTasks(
            sources, targets, sizes, rows=range(5), factors=factors, flags=flags, independent=True
        )
        for part in moved.launches(3):
            (found, blocks), (expected, count) = (one.argument(part, 2048, 100) for one in (moved, new))
            assert (found.tobytes(), blocks) == (expected.tobytes(), count)
