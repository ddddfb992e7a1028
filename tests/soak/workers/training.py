# SPDX-License-Identifier: Apache-2.0
"""Trains thousands of iterations and checks that nothing grows: python training.py DELAY."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from typing import Dict

import numpy as np
import psutil

from nnabla_adaloss import AdaLossConfig
from tests.worlds.trainings import training, updater_on

ITERATIONS = int(os.environ.get("ADALOSS_SOAK_ITERATIONS", "4000"))
OVERFLOW_EVERY = 97
MIB = 2.0**20


def objects() -> Dict[str, int]:
    gc.collect()
    return Counter(type(o).__name__ for o in gc.get_objects())


def largest_containers() -> int:
    gc.collect()
    return sum(len(o) for o in gc.get_objects() if type(o) in (list, dict, set))


def check_that_nothing_grows(delay: int) -> None:
    train = training(overflow=range(OVERFLOW_EVERY, 10**9, OVERFLOW_EVERY))
    train.solver.set_learning_rate(1e-5)
    updater = updater_on(train, N=50, config=AdaLossConfig(delay=delay))
    process = psutil.Process()
    scales = np.empty(ITERATIONS)

    def run(start: int, stop: int) -> None:
        for i in range(start, stop):
            result = updater.update()
            scales[i] = result.scale
            assert result.updated

    warm = ITERATIONS // 2
    run(0, warm)
    objects(), largest_containers()  # counting for the first time leaves caches behind
    count, elements, memory = sum(objects().values()), largest_containers(), process.memory_info().rss
    run(warm, ITERATIONS)
    grown = process.memory_info().rss - memory

    assert abs(grown) <= MIB, f"{grown / MIB:.2f} MiB"
    assert abs(sum(objects().values()) - count) <= 50
    assert abs(largest_containers() - elements) <= 100
    assert updater.counters.batches - ITERATIONS == (updater.counters.batches - 1) // OVERFLOW_EVERY
    mantissas, exponents = np.frexp(scales)
    assert np.isfinite(scales).all()
    assert (mantissas == 0.5).all()
    # The network hardly changes, nor does what it has room for.
    assert np.ptp(exponents) <= 3


if __name__ == "__main__":
    check_that_nothing_grows(int(sys.argv[1]))
