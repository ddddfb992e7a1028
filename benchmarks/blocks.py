# SPDX-License-Identifier: Apache-2.0
"""Times of alternating iterations, by blocks that include the expensive ones.

Of eight iterations one or two measure and choose scales, and cost much more than the others. A median over
iterations ignores them; a mean over whole cycles does not. A block is a whole number of cycles, and the
result is the median over blocks, as a short disturbance affects only one. Actions take turns iteration by
iteration, so that a longer disturbance affects all of them.
"""

from __future__ import annotations

import time
from statistics import mean, median
from typing import Any, Callable, Dict, List, NamedTuple, Sequence

BLOCK = 16
"""Iterations of a block: two cycles of the default `measure_every=8`."""

Action = Callable[[], Any]


def bare_loop(solver: Any, loss: Any, scale: float = 1.0) -> Action:
    """Train one iteration with nnabla alone."""

    def update() -> None:
        solver.zero_grad()
        loss.forward(clear_no_need_grad=True)
        loss.backward(scale, clear_buffer=True)
        solver.update()

    return update


class Times(NamedTuple):
    """Times of one run of an action, in seconds."""

    wall: float
    cpu: float


def measure(action: Action) -> Times:
    """Run an action once and return its times."""
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return Times(time.perf_counter() - wall, time.process_time() - cpu)


def take_turns(actions: Dict[str, Action], blocks: int) -> Dict[str, List[Times]]:
    """Time each iteration of this many blocks, after half a block that is not counted.

    Each turn starts with another action.
    """
    names = list(actions)
    taken: Dict[str, List[Times]] = {name: [] for name in names}
    for number in range(BLOCK // 2 + BLOCK * blocks):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            times = measure(actions[name])
            if number >= BLOCK // 2:
                taken[name].append(times)
    return taken


def means(times: Sequence[Times], clock: str) -> List[float]:
    """Mean seconds per iteration of each block. `clock` is "wall" or "cpu"."""
    spent = [getattr(time, clock) for time in times]
    return [mean(spent[start : start + BLOCK]) for start in range(0, len(spent) - BLOCK + 1, BLOCK)]


def ratio(taken: Dict[str, List[Times]], name: str, to: str, clock: str) -> float:
    """Time of `name` relative to `to`: the median over the blocks of the ratio of their means."""
    return median(a / b for a, b in zip(means(taken[name], clock), means(taken[to], clock)))
