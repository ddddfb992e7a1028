# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from nnabla_adaloss.kernels.device_tasks import DeviceTasks


def test_tasks_that_are_moved_are_launched_as_new_ones() -> None:
    sizes, factors = [1, 5000, 0, 70, 3 * 10**6], [1.0, 2.0, 0.5, 4.0, 8.0]
    first, second = range(16, 96, 16), range(116, 196, 16)
    moved = DeviceTasks(first, first, sizes, rows=range(5), factors=factors, flags=1)
    for sources, targets, flags in ((first, first, 1), (second, first, [0, 1, 2, 3, 0]), (first, second, 0)):
        moved.move(sources, targets, flags)
        new = DeviceTasks(sources, targets, sizes, rows=range(5), factors=factors, flags=flags)
        for part in (slice(0, 3), slice(3, 5)):
            (found, blocks), (expected, count) = (one.argument(part, 2048, 100) for one in (moved, new))
            assert (found.tobytes(), blocks) == (expected.tobytes(), count)
