# SPDX-License-Identifier: Apache-2.0
"""A thread keeps an exponential moving average of the parameters, while the training goes on."""

from __future__ import annotations

import queue
import threading
from typing import Dict, List, NamedTuple, Optional, Set, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from tests.programs.programs import (
    CLASSES,
    FEATURES,
    Examination,
    Outcome,
    Progress,
    Stream,
    assert_same_or_better,
    checksum,
    points,
    start,
    updater_of,
    values_of,
)

BATCH = 32
KEPT = 0.95


def network(count: int) -> Tuple[nn.Variable, nn.Variable, nn.Variable, nn.Variable]:
    x, t = nn.Variable((count, FEATURES)), nn.Variable((count, 1))
    h = x
    for i in range(5):
        h = F.tanh(PF.affine(h, 48, name=f"fc{i}"))
    y = PF.affine(h, CLASSES, name="output")
    return x, t, y, F.mean(F.softmax_cross_entropy(y, t))


class Trained(NamedTuple):
    """What came out, and what was averaged that no update had left behind."""

    outcome: Outcome
    averaged: int
    strange: int


def train(kind: str) -> Trained:
    start()
    x_test, t_test, y_test, loss_test = network(200)
    x_test.d, t_test.d = points(np.random.default_rng(2), 200)
    examination = Examination(loss_test, y_test)

    x, t, _, loss = network(BATCH)
    stream = Stream(200, overflow=(15, 16, 80, 150))

    def feed() -> None:
        x.d, t.d = points(stream.next(), BATCH)

    parameters = nn.get_parameters()
    solver = S.Adam(0.003)
    solver.set_parameters(parameters)
    updater = updater_of(kind, solver, stream.gated(loss), feed)
    # Nothing tells when an emulation swaps weights for rounded ones: the baseline's whole update is locked.
    lock = updater.parameters_lock if kind != "dynamic" else threading.Lock()

    average = values_of(parameters)
    seen: List[int] = []
    updates: queue.Queue[Optional[int]] = queue.Queue()

    def follow() -> None:
        while updates.get() is not None:
            with lock:
                values = values_of(parameters)
            seen.append(checksum(values))
            for name, value in values.items():
                average[name] += (1.0 - KEPT) * (value - average[name])

    def update() -> None:
        if kind != "dynamic":
            updater.update()
        else:
            with lock:
                updater.update()

    progress = Progress(solver, stream)
    existed: Set[int] = set()
    follower = threading.Thread(target=follow)
    follower.start()
    try:
        while stream.left:
            update()
            progress.note()
            with lock:  # also against the other reader: two at a time is more than an nnabla array stands
                existed.add(checksum(values_of(parameters)))
            updates.put(stream.number)
    finally:
        updates.put(None)
        follower.join()
    load(average)
    return Trained(
        examination.outcome(progress.learned), len(seen), len([s for s in seen if s not in existed])
    )


def load(average: Dict[str, np.ndarray]) -> None:
    for name, v in nn.get_parameters().items():
        v.d = average[name]


@pytest.mark.slow
def test_a_thread_that_averages_parameters() -> None:
    ours, theirs = train("adaptive"), train("dynamic")
    assert ours.averaged >= len(ours.outcome.learned)
    assert (ours.strange, theirs.strange) == (0, 0)
    # Which updates are averaged is decided by the clock.
    assert_same_or_better(ours.outcome, theirs.outcome, tolerance=0.05)
