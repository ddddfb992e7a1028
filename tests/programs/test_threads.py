# SPDX-License-Identifier: Apache-2.0
"""Programs that look at parameters while the training goes on: a thread, and the handler of a signal."""

from __future__ import annotations

import itertools
import os
import queue
import random
import signal
import threading
from pathlib import Path
from typing import Any, Iterator, List, NamedTuple, Optional, Set

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import pytest

from tests.programs.programs import (
    CLASSES,
    FEATURES,
    Network,
    Outcome,
    Stream,
    Training,
    assert_same_or_better,
    checksum,
    points,
    start,
)
from tests.worlds.values import snapshot

KEPT = 0.95
SIGNALS = 20


class Trained(NamedTuple):
    """What came out, which parameters were seen, and which there were between updates, as checksums."""

    outcome: Outcome
    seen: List[int]
    existed: Set[int]

    @property
    def strange(self) -> List[int]:
        """What was seen that no update had left behind."""
        return [one for one in self.seen if one not in self.existed]


def network(layers: int, width: int, *, normalized: bool) -> Network:
    def build(count: int) -> Any:
        x, t = nn.Variable((count, FEATURES)), nn.Variable((count, 1))
        h = x
        for i in range(layers):
            h = PF.affine(h, width, name=f"fc{i}")
            h = F.tanh(PF.batch_normalization(h, name=f"bn{i}") if normalized else h)
        y = PF.affine(h, CLASSES, name="output")
        return [x, t], y, F.mean(F.softmax_cross_entropy(y, t))

    return build


def parameter_average(kind: str, *, examined: bool = True) -> Trained:
    """A thread keeps an exponential moving average of the parameters, which is examined instead of them."""
    stream = Stream(200, overflow=(15, 16, 80, 150))
    training = Training(kind, network(5, 48, normalized=False), points, stream, S.Adam(0.003))
    parameters = nn.get_parameters()
    # Nothing tells when an emulation swaps weights for rounded ones: the baseline's whole update is locked.
    lock = training.updater.parameters_lock if kind != "dynamic" else threading.Lock()
    average = snapshot(parameters)
    seen: List[int] = []
    existed: Set[int] = set()
    updates: queue.Queue[Optional[int]] = queue.Queue()

    def follow() -> None:
        while updates.get() is not None:
            with lock:
                values = snapshot(parameters)
            seen.append(checksum(values))
            for name, value in values.items():
                average[name] += (1.0 - KEPT) * (value - average[name])

    follower = threading.Thread(target=follow)
    follower.start()
    try:
        while stream.left:
            if kind == "dynamic":
                with lock:
                    training.update()
            else:
                training.update()
            with lock:  # also against the other reader: two at a time is more than an nnabla array stands
                existed.add(checksum(snapshot(parameters)))
            updates.put(stream.number)
    finally:
        updates.put(None)
        follower.join()
    for name, v in parameters.items() if examined else ():
        v.d = average[name]
    return Trained(training.examination.outcome(training.learned), seen, existed)


@pytest.mark.slow
def test_a_thread_that_averages_parameters() -> None:
    start()
    ours = parameter_average("adaptive")
    start()
    theirs = parameter_average("dynamic")
    assert len(ours.seen) >= len(ours.outcome.learned)
    assert not ours.strange + theirs.strange
    # Which updates are averaged is decided by the clock.
    assert_same_or_better(ours.outcome, theirs.outcome, tolerance=0.05)


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


def preemption(kind: str, folder: Path) -> Trained:
    """A cluster that wants the machine back sends a signal; its handler saves the parameters."""
    stream = Stream(150, overflow=(15, 16, 80, 120))
    training = Training(kind, network(3, 32, normalized=True), points, stream, S.Adam(0.003))
    parameters = nn.get_parameters(grad_only=False)
    numbers = itertools.count()
    wanted: List[int] = []
    saved, finished = threading.Event(), threading.Event()

    def save() -> None:
        nn.save_parameters(str(folder / f"{kind}-{next(numbers)}.h5"))
        saved.set()

    def handle(signum: int, frame: Any) -> None:
        if kind != "dynamic":
            training.updater.when_idle(save)
        else:
            wanted.append(signum)

    existed = {checksum(snapshot(parameters))}
    signal.signal(signal.SIGUSR1, handle)
    sender = threading.Thread(target=send_signals, args=(saved, finished))
    sender.start()
    try:
        while stream.left:
            training.update()
            existed.add(checksum(snapshot(parameters)))
            if wanted:
                wanted.clear()
                save()
    finally:
        finished.set()
        sender.join()
    outcome = training.examination.outcome(training.learned)
    return Trained(outcome, [checksum_of_file(path) for path in folder.glob(f"{kind}-*.h5")], existed)


def checksum_of_file(path: Path) -> int:
    with nn.parameter_scope("loaded", {}):
        nn.load_parameters(str(path))
        return checksum(snapshot(nn.get_parameters(grad_only=False)))


@pytest.fixture
def _handler() -> Iterator[None]:
    """Whatever handles the signal now does so again after the test."""
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.slow
@pytest.mark.usefixtures("_handler")
@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="needs POSIX signals")
def test_parameters_that_a_signal_handler_saves(tmp_path: Path) -> None:
    start()
    ours = preemption("adaptive", tmp_path)
    start()
    theirs = preemption("dynamic", tmp_path)
    for trained in (ours, theirs):
        assert len(trained.seen) >= 5
        assert not trained.strange
    assert_same_or_better(ours.outcome, theirs.outcome, tolerance=0.02)
