# SPDX-License-Identifier: Apache-2.0
"""Updates, callbacks, and who saves or loads have the state for themselves, one after the other."""

from __future__ import annotations

import threading
from typing import Any, Callable, Dict

import pytest

from nnabla_adaloss.updaters.idle import Idle
from tests.worlds.trainings import training, updater_on
from tests.worlds.values import snapshot


def in_a_thread(call: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def test_what_waits_is_called_once_in_order_and_after_exceptions_too() -> None:
    idle, seen = Idle(), []
    idle.when_idle(lambda: seen.append("now"))

    def update() -> None:
        try:
            with idle.exclusive, idle.running(), idle.running():
                for i in range(2):
                    idle.when_idle(lambda i=i: seen.append(i))
                seen.append("update")
                raise KeyError
        finally:
            idle.drain()

    with pytest.raises(KeyError):
        update()
    assert seen == ["now", "update", 0, 1]
    with idle.running():
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


def test_an_update_waits_as_a_whole_for_a_callback_of_another_thread() -> None:
    train, began, may_end = training(), threading.Event(), threading.Event()
    updater, states = updater_on(train), []
    updater.update()

    def callback() -> None:
        began.set()
        states.append(updater.state_dict())
        assert may_end.wait(60)
        states.append(updater.state_dict())

    one = in_a_thread(lambda: updater.when_idle(callback))
    assert began.wait(60)
    # The callback ends only some time after this thread has asked for its update.
    threading.Timer(0.05, may_end.set).start()
    updater.update()
    one.join()
    assert states[0] == states[1]
    assert states[0]["counters"]["fed"] == states[0]["iteration"] == 1
    assert updater.counters.updates == 2


def test_a_feeder_may_wait_for_a_thread_that_reads_parameters_or_asks_for_a_callback() -> None:
    train, seen = training(), []

    def read() -> None:
        with updater.parameters_lock:
            seen.append(snapshot(train.parameters))
        updater.when_idle(lambda: seen.append("idle"))
        with pytest.raises(RuntimeError, match=r"^state_dict\(\) while an update, or .* updater.when_idle$"):
            updater.state_dict()

    def feed() -> None:
        train.feed()
        in_a_thread(read).join()

    updater = updater_on(train._replace(feed=feed))
    assert updater.update().updated
    assert seen[1:] == ["idle"]


def test_updates_of_two_threads_run_one_after_the_other() -> None:
    train, running, most = training(), [], []

    def feed() -> None:
        running.append(True)
        most.append(len(running))
        train.feed()

    updater = updater_on(train._replace(feed=feed), on_gradients=lambda solver: running.pop())
    threads = [in_a_thread(lambda: [updater.update() for _ in range(5)]) for _ in range(2)]
    for thread in threads:
        thread.join()
    assert most == [1] * 10
    assert updater.counters.updates == 10


def test_a_callback_may_train() -> None:
    updater = updater_on(training())
    updater.when_idle(updater.update)
    assert updater.counters.updates == 1


def test_a_rollback_that_was_interrupted_ends_before_the_state_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train = training()

    def feed() -> None:
        train.feed()
        if updater.counters.fed == 3:
            raise KeyboardInterrupt

    def interrupted() -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    updater = updater_on(train._replace(feed=feed))
    for _ in range(3):
        updater.update()
    before: Dict[str, Any] = updater.state_dict()
    monkeypatch.setattr(updater.scaling.guard, "undo_window", interrupted)
    with pytest.raises(KeyboardInterrupt):
        updater.update()
    assert updater.state_dict() == before
