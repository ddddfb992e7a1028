# SPDX-License-Identifier: Apache-2.0
"""Times of iterations, in turns and by the block: what a training pays, dear iterations included.

Of eight iterations one or two measure and choose scales, and cost much more than the others. A median over
iterations does not see them; a mean over whole cycles does. A block is a whole number of cycles, and what is
told of many blocks is the median: what slows the machine down for a moment spoils one of them. Actions take
turns iteration by iteration, so that what slows it down for longer slows all of them.
"""

from __future__ import annotations

import time
from statistics import mean, median
from typing import Any, Callable, Dict, List, NamedTuple, Sequence

BLOCK = 16
"""Iterations of a block: two cycles of the default `measure_every=8`."""

Action = Callable[[], Any]


def bare_loop(solver: Any, loss: Any, scale: float = 1.0) -> Action:
    """An iteration of nnabla alone."""

    def update() -> None:
        solver.zero_grad()
        loss.forward(clear_no_need_grad=True)
        loss.backward(scale, clear_buffer=True)
        solver.update()

    return update


class Times(NamedTuple):
    """What one run of an action took, in seconds."""

    wall: float
    cpu: float


def measure(action: Action) -> Times:
    """Run an action once and return what it took."""
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return Times(time.perf_counter() - wall, time.process_time() - cpu)


def take_turns(actions: Dict[str, Action], blocks: int) -> Dict[str, List[Times]]:
    """What each iteration took of so many blocks; half a block before them is not counted.

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
    """Seconds per iteration, block by block. `clock` is "wall" or "cpu"."""
    spent = [getattr(time, clock) for time in times]
    return [mean(spent[start : start + BLOCK]) for start in range(0, len(spent) - BLOCK + 1, BLOCK)]


def ratio(taken: Dict[str, List[Times]], name: str, to: str, clock: str) -> float:
    """How much longer `name` took than `to`: the median over the blocks of the ratio of their means."""
    return median(a / b for a, b in zip(means(taken[name], clock), means(taken[to], clock)))
