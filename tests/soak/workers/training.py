# SPDX-License-Identifier: Apache-2.0
"""Trains thousands of iterations and checks that nothing grows: python training.py DELAY."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from typing import Dict, List, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import psutil

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScalingUpdater

ITERATIONS = int(os.environ.get("ADALOSS_SOAK_ITERATIONS", "4000"))
OVERFLOW_EVERY = 97
MIB = 2.0**20


def updater_on(delay: int) -> Tuple[AdaptiveLossScalingUpdater, List[int]]:
    """An updater, and the number of batches that it was fed."""
    nn.clear_parameters()
    rng = np.random.default_rng(0)
    weights = np.random.RandomState(0)
    x, t, one = nn.Variable((4, 6)), nn.Variable((4, 1)), nn.Variable((1,))
    h = F.tanh(PF.affine(x, 8, name="a", rng=weights))
    y = PF.affine(h, 3, name="b", rng=weights)
    # sqrt has an infinite slope at 0: where ``one`` is 0, every gradient is lost.
    root = F.pow_scalar(F.reshape(F.mean(y) * 0.0, (1,)) + one, 0.5)
    loss = F.mean(F.softmax_cross_entropy(y, t)) + F.sum(root)
    solver = S.Momentum(1e-3)
    solver.set_parameters(nn.get_parameters())
    batches = [0]

    def feed() -> None:
        batches[0] += 1
        x.d = rng.standard_normal(x.shape)
        t.d = rng.integers(0, 3, t.shape)
        one.d = float(batches[0] % OVERFLOW_EVERY != 0)

    config = AdaLossConfig(delay=delay)
    return AdaptiveLossScalingUpdater(solver, loss, feed, N=50, storage="float16", config=config), batches


def objects() -> Dict[str, int]:
    gc.collect()
    return Counter(type(o).__name__ for o in gc.get_objects())


def largest_containers() -> int:
    gc.collect()
    return sum(len(o) for o in gc.get_objects() if type(o) in (list, dict, set))


def check_that_nothing_grows(delay: int) -> None:
    updater, batches = updater_on(delay)
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
    assert batches[0] - ITERATIONS == batches[0] // OVERFLOW_EVERY
    mantissas, exponents = np.frexp(scales)
    assert np.isfinite(scales).all()
    assert (mantissas == 0.5).all()
    # The network hardly changes, nor does what it has room for.
    assert np.ptp(exponents) <= 3


if __name__ == "__main__":
    check_that_nothing_grows(int(sys.argv[1]))
