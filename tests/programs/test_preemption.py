# SPDX-License-Identifier: Apache-2.0
"""A cluster that wants the machine back sends a signal; its handler saves the parameters."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any, Iterator, List, NamedTuple, Set, Tuple

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
SIGNALS = 20


@pytest.fixture
def _handler() -> Iterator[None]:
    """Whatever handles the signal now does so again after the test."""
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def network(count: int) -> Tuple[nn.Variable, nn.Variable, nn.Variable, nn.Variable]:
    x, t = nn.Variable((count, FEATURES)), nn.Variable((count, 1))
    h = x
    for i in range(3):
        h = F.tanh(PF.batch_normalization(PF.affine(h, 32, name=f"fc{i}"), name=f"bn{i}"))
    y = PF.affine(h, CLASSES, name="output")
    return x, t, y, F.mean(F.softmax_cross_entropy(y, t))


def send_signals(saved: threading.Event, finished: threading.Event) -> None:
    """Send a signal at a random moment, and the next one when parameters are saved."""
    rng = random.Random(0)
    for _ in range(SIGNALS):
        if finished.wait(rng.uniform(0.001, 0.02)):
            return
        saved.clear()
        os.kill(os.getpid(), signal.SIGUSR1)
        while not saved.wait(0.01):
            if finished.is_set():
                return


class Trained(NamedTuple):
    """What came out, what was saved, and what parameters there were between updates."""

    outcome: Outcome
    saved: List[int]
    existed: Set[int]


def train(kind: str, folder: Path) -> Trained:
    start()
    x_test, t_test, y_test, loss_test = network(200)
    x_test.d, t_test.d = points(np.random.default_rng(2), 200)
    examination = Examination(loss_test, y_test)

    x, t, _, loss = network(BATCH)
    stream = Stream(150, overflow=(15, 16, 80, 120))

    def feed() -> None:
        x.d, t.d = points(stream.next(), BATCH)

    parameters = nn.get_parameters(grad_only=False)
    solver = S.Adam(0.003)
    solver.set_parameters(nn.get_parameters())
    updater = updater_of(kind, solver, stream.gated(loss), feed)
    numbers = itertools.count()
    wanted: List[int] = []
    saved, finished = threading.Event(), threading.Event()

    def save() -> None:
        nn.save_parameters(str(folder / f"{kind}-{next(numbers)}.h5"))
        saved.set()

    def handle(signum: int, frame: Any) -> None:
        if kind != "dynamic":
            updater.when_idle(save)
        else:
            wanted.append(signum)

    progress = Progress(solver, stream)
    existed = {checksum(values_of(parameters))}
    signal.signal(signal.SIGUSR1, handle)
    sender = threading.Thread(target=send_signals, args=(saved, finished))
    sender.start()
    try:
        while stream.left:
            updater.update()
            progress.note()
            existed.add(checksum(values_of(parameters)))
            if wanted:
                wanted.clear()
                save()
    finally:
        finished.set()
        sender.join()
    outcome = examination.outcome(progress.learned)
    return Trained(outcome, [checksum_of_file(path) for path in folder.glob(f"{kind}-*.h5")], existed)


def checksum_of_file(path: Path) -> int:
    with nn.parameter_scope("loaded", {}):
        nn.load_parameters(str(path))
        return checksum(values_of(nn.get_parameters(grad_only=False)))


@pytest.mark.slow
@pytest.mark.usefixtures("_handler")
@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="needs POSIX signals")
def test_parameters_that_a_signal_handler_saves(tmp_path: Path) -> None:
    ours, theirs = train("adaptive", tmp_path), train("dynamic", tmp_path)
    for trained in (ours, theirs):
        assert len(trained.saved) >= 5
        strange = [saved for saved in trained.saved if saved not in trained.existed]
        assert not strange, (
            f"{len(strange)} of {len(trained.saved)} files hold what no update had left behind"
        )
    assert_same_or_better(ours.outcome, theirs.outcome, tolerance=0.02)
