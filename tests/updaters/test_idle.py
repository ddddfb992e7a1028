# SPDX-License-Identifier: Apache-2.0
"""Snapshots of parameters at any moment: from other threads, and from handlers of signals."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any, Iterator, List

import nnabla as nn
import pytest

from nnabla_adaloss import AdaLossConfig
from nnabla_adaloss.updaters.idle import Idle
from tests.updaters.networks import assert_equal, snapshot, training, updater_on

SNAPSHOTS = 1000
CONFIG = AdaLossConfig(loss_scale_method="fixed", fixed_loss_scale=4.0, use_bound=False)


class Watched:
    """A training that notes after each update what the parameters are."""

    def __init__(self) -> None:
        train = training()
        self.parameters = train.parameters
        # Its data feeder takes its time, as real ones do.
        self.updater = updater_on(train, config=CONFIG)
        self.valid = {self.snapshot()}

    def snapshot(self) -> bytes:
        return b"".join(v.data.data.tobytes() for v in self.parameters.values())

    def update(self) -> None:
        assert self.updater.update().updated
        # Not in between: nnabla tries an import at every look, and a handler that does so inside of it fails.
        self.updater.when_idle(lambda: self.valid.add(self.snapshot()))


@pytest.mark.slow
def test_a_thread_that_holds_the_lock_never_sees_swapped_weights() -> None:
    watched = Watched()
    taken: List[bytes] = []

    def watch() -> None:
        while len(taken) < SNAPSHOTS:
            with watched.updater.parameters_lock:
                taken.append(watched.snapshot())

    thread = threading.Thread(target=watch)
    thread.start()
    while thread.is_alive():
        watched.update()
    thread.join()
    assert set(taken) <= watched.valid
    assert len(set(taken)) > 1


@pytest.fixture
def _alarm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGALRM)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("_alarm")
def test_parameters_can_be_saved_from_a_handler(tmp_path: Any) -> None:
    watched = Watched()
    path = str(tmp_path / "parameters.h5")

    def save() -> None:
        nn.save_parameters(path)
        watched.updater.save_states(tmp_path / "scaling.json")

    signal.signal(signal.SIGALRM, lambda *_: watched.updater.when_idle(save))
    feeder = watched.updater.data_feeder

    def feed() -> None:
        feeder()
        os.kill(os.getpid(), signal.SIGALRM)
        time.sleep(0.001)
        assert not os.path.exists(path)

    watched.updater.data_feeder = feed
    watched.update()
    expected = snapshot(watched.parameters)
    nn.clear_parameters()
    nn.load_parameters(path)
    assert_equal(snapshot(), expected)


def test_what_waits_is_called_once_in_order_and_after_exceptions_too() -> None:
    idle, seen = Idle(), []
    idle.when_idle(lambda: seen.append("now"))

    def update() -> None:
        try:
            with idle.update(), idle.update():
                for i in range(2):
                    idle.when_idle(lambda i=i: seen.append(i))
                seen.append("update")
                raise KeyError
        finally:
            idle.drain()

    with pytest.raises(KeyError):
        update()
    assert seen == ["now", "update", 0, 1]
    with idle.update():
        pass
    idle.drain()
    assert len(seen) == 4
    with pytest.raises(TypeError, match="^callback must be callable without arguments, got str$"):
        idle.when_idle("now")  # type: ignore[arg-type]


def test_callbacks_do_not_nest() -> None:
    idle, seen = Idle(), []

    def first() -> None:
        idle.when_idle(lambda: seen.append("second"))
        seen.append("first")

    idle.when_idle(first)
    assert seen == ["first", "second"]
    with pytest.raises(KeyError):
        idle.when_idle(lambda: {}["nothing"])
    idle.when_idle(lambda: seen.append("third"))
    assert seen[-1] == "third"
