# SPDX-License-Identifier: Apache-2.0
"""Snapshots of parameters at any moment: from other threads, and from handlers of signals."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from nnabla_adaloss import AdaLossConfig
from nnabla_adaloss.updaters.idle import Idle
from tests.worlds.trainings import training, updater_on
from tests.worlds.values import assert_equal, snapshot


def test_parameters_are_locked_while_they_are_swapped_and_callbacks_wait_for_the_end() -> None:
    train, locked, seen = training(), [], []

    def look(f: Any) -> None:
        one = threading.Thread(
            target=lambda: locked.append(not updater.parameters_lock.acquire(blocking=False))
        )
        one.start()
        one.join()

    def feed() -> None:
        train.feed()
        updater.when_idle(lambda: seen.append(snapshot(train.parameters)))
        assert not seen

    config = AdaLossConfig(loss_scale_method="fixed", fixed_loss_scale=4.0, use_bound=False)
    updater = updater_on(train._replace(feed=feed), config=config, function_pre_hook=(None, look))
    before = snapshot(train.parameters)
    assert updater.update().updated
    assert locked
    assert all(locked)
    assert_equal(seen[0], snapshot(train.parameters))
    assert (seen[0]["conv/conv/W"] != before["conv/conv/W"]).any()
    with updater.parameters_lock:
        updater.when_idle(lambda: seen.append({}))
    assert len(seen) == 2


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
