# SPDX-License-Identifier: Apache-2.0
"""Updates, callbacks, and who saves or loads have the state for themselves, one after the other."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Sequence

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import save_checkpoint
from nnabla_adaloss.updaters.idle import Idle
from tests.worlds.trainings import training, updater_of, updater_on
from tests.worlds.values import data, snapshot


def in_a_thread(call: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def test_waiting_callbacks_run_once_in_order_and_after_exceptions_too() -> None:
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


def test_a_callback_that_asks_for_itself_does_not_hold_up_the_training() -> None:
    idle, called = Idle(), []

    def again() -> None:
        called.append(len(called))
        idle.when_idle(again)

    idle.when_idle(again)
    before = len(called)
    assert before == 2
    idle.drain()
    assert len(called) == 2 * before


def test_a_callback_has_the_parameters_for_itself() -> None:
    """At once, and where it has waited for an update."""
    idle, free = Idle(), []

    def callback() -> None:
        in_a_thread(lambda: free.append(idle.turns[0].lock.acquire(blocking=False))).join()

    idle.when_idle(callback)
    with idle.exclusive, idle.running():
        idle.when_idle(callback)
    idle.drain()
    callback()
    assert free == [False, False, True]


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


def test_callbacks_wait_for_the_end_of_a_save_that_reads_a_state() -> None:
    idle, seen = Idle(), []
    with idle.between_updates("save_checkpoint()"):
        with idle.between_updates("state_dict()"):
            in_a_thread(lambda: idle.when_idle(lambda: seen.append("of a thread"))).join()
        # As from a signal handler, which runs in this thread.
        idle.when_idle(lambda: seen.append("of a signal"))
        seen.append("saved")
    assert seen == ["saved", "of a thread", "of a signal"]


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


class Shared(NamedTuple):
    """Two heads on one encoder, each with an updater, and what runs at a time."""

    updaters: List[Any]
    most: List[int]
    encoder: Any


def two_heads(solver: Any = None, **options: Any) -> Shared:
    """Two updaters with solvers of their own, as a GAN has, or with one."""
    x, running, most = data(4, 3), [], []
    h = F.tanh(PF.affine(x, 3, name="encoder"))
    updaters = []
    for name in "ab":
        loss = F.mean(PF.affine(h, 2, name=name) ** 2)
        own = {k: v for k, v in nn.get_parameters().items() if k.startswith((name, "encoder"))}

        def feed() -> None:
            running.append(1)
            most.append(len(running))

        hooks = {"on_gradients": lambda _: running.pop(), **options}
        updaters.append(updater_of(loss, feed, *([S.Sgd(0.1), own] if solver is None else [solver]), **hooks))
    return Shared(updaters, most, nn.get_parameters()["encoder/affine/W"])


def ended(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("solver", [None, S.Adam(0.1)], ids=["of their own", "one"])
def test_updaters_that_share_parameters_or_a_solver_take_turns(solver: Any) -> None:
    updaters, most, _ = two_heads(solver)
    states: List[Any] = []

    def save() -> None:
        states.append([(u.counters.fed, u.counters.updates, u.iteration) for u in updaters])

    def train(updater: Any) -> None:
        for _ in range(8):
            assert updater.update().updated

    threads = [in_a_thread(lambda u=u: train(u)) for u in updaters]
    threads += [in_a_thread(lambda u=u: [u.when_idle(save) for _ in range(8)]) for u in updaters]
    ended(threads)
    assert most == [1] * 16
    updaters[0].when_idle(save)
    assert len(states) == 17
    assert all(fed == updates == iteration for one in states for fed, updates, iteration in one)


def test_a_callback_of_one_waits_for_the_update_of_another(tmp_path: Path) -> None:
    (one, other), _, encoder = two_heads()
    seen: List[Any] = []

    def feed() -> None:
        for updater in (one, other):
            updater.when_idle(lambda: seen.append(encoder.d.copy()))
            with pytest.raises(RuntimeError, match="while an update"):
                save_checkpoint(
                    tmp_path / "c", updater, *(u.solver for u in (one, other) if u is not updater)
                )

        def read() -> None:
            with other.parameters_lock:
                seen.append("read")

        ended([in_a_thread(read), in_a_thread(lambda: other.when_idle(lambda: seen.append("called")))])
        assert seen == ["read"]

    one.data_feeder, one.on_gradients = feed, None
    one.update()
    assert seen[-1] == "called"
    for array in seen[1:3]:
        np.testing.assert_array_equal(array, encoder.d)
    other.on_gradients = None
    save_checkpoint(tmp_path / "c", one, other)


def test_one_may_train_within_the_update_of_another() -> None:
    (one, other), _, _ = two_heads()
    one.on_gradients = None
    other.on_gradients = lambda solver: one.update() and other.when_idle(lambda: done.append(1))
    done: List[int] = []
    other.update()
    assert (one.counters.updates, other.counters.updates, done) == (1, 1, [1])


def test_an_update_of_several_turns_holds_and_empties_each() -> None:
    singles, called, free = [Idle(), Idle()], [], []
    both = Idle([turn for idle in singles for turn in idle.turns])
    with both.exclusive, both.lock, both.running():
        for number, idle in enumerate(singles):
            # In the thread of the update, as from a signal handler.
            idle.when_idle(lambda number=number: called.append(number))
            in_a_thread(lambda idle=idle: free.append(idle.turns[0].lock.acquire(blocking=False))).join()
    assert (called, free) == ([], [False, False])
    both.drain()
    assert called == [0, 1]


def test_an_updater_that_joins_two_others_takes_turns_with_both() -> None:
    losses = [F.mean(PF.affine(data(4, 3), 2, name=name) ** 2) for name in "ab"]
    inside, most = [], []

    def feed() -> None:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.001)

    def updater(*numbers: int) -> Any:
        own = {k: v for k, v in nn.get_parameters().items() if k[0] in ["ab"[n] for n in numbers]}
        return updater_of(sum(losses[n] for n in numbers) * 1.0, solver=S.Sgd(0.1), parameters=own)

    one, other, both = updater(0), updater(1), updater(0, 1)
    turns = [updater._idle.turns for updater in (one, other, both)]
    assert {*turns[2]} == {*turns[0], *turns[1]}
    assert set(turns[0]).isdisjoint(turns[1])
    both.data_feeder, both.on_gradients = feed, lambda _: inside.pop()
    seen: List[bool] = []
    for single in (one, other):
        single.data_feeder = lambda: seen.append(bool(inside))

    called: List[bool] = []

    def train(updater: Any) -> None:
        for _ in range(20):
            updater.update()
            both.when_idle(lambda: called.append(any(t.running.locked() for t in turns[2])))

    ended([in_a_thread(lambda u=u: train(u)) for u in (one, other, both, both)])
    both.when_idle(lambda: called.append(False))
    assert most == [1] * 40
    assert not any(seen)
    assert called == [False] * 81
    with both.parameters_lock:
        assert one.parameters_lock.acquire(blocking=False)
        one.parameters_lock.release()
        locked: List[bool] = []
        ended([in_a_thread(lambda: locked.append(one.parameters_lock.acquire(blocking=False)))])
    assert locked == [False]


def test_a_handler_that_raises_while_an_update_waits_leaves_nothing_locked() -> None:
    losses = [F.mean(PF.affine(data(4, 3), 2, name=name) ** 2) for name in "ab"]
    parameters = nn.get_parameters()
    singles = [
        updater_of(loss, parameters={k: v for k, v in parameters.items() if k[0] == name})
        for name, loss in zip("ab", losses)
    ]
    both = updater_of(losses[0] + losses[1])
    began, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        began.set()
        assert may_end.wait(60)

    thread = in_a_thread(lambda: singles[1].when_idle(hold))
    assert began.wait(60)

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    main = threading.get_ident()
    threading.Timer(0.05, lambda: signal.pthread_kill(main, signal.SIGUSR1)).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            both.update()
    finally:
        signal.signal(signal.SIGUSR1, before)
        may_end.set()
    ended([thread])
    ended([in_a_thread(updater.update) for updater in (*singles, both)])
    assert [u.counters.updates for u in (*singles, both)] == [1, 1, 1]


def test_updaters_that_share_nothing_do_not_wait_for_each_other() -> None:
    updaters = [updater_of(F.mean(PF.affine(data(4, 3), 2, name=n) ** 2), parameters={}) for n in "ab"]
    for updater, name in zip(updaters, "ab"):
        updater.solver.set_parameters({k: v for k, v in nn.get_parameters().items() if k[0] == name})
    one, other = updaters
    one.data_feeder = lambda: ended([in_a_thread(other.update)])
    assert one.update().updated
    assert other.counters.updates == 1


def test_a_callback_may_train() -> None:
    updater = updater_on(training())
    updater.when_idle(updater.update)
    assert updater.counters.updates == 1


@pytest.mark.parametrize("then", ["read", "load", "set"])
def test_a_rollback_that_was_interrupted_ends_before_the_state_is_used(
    then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, ends = training(), [False] * 3 + [True]

    def feed() -> None:
        train.feed()
        if ends and ends.pop(0):
            raise KeyboardInterrupt

    def interrupted() -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    updater = updater_on(train._replace(feed=feed), global_scale="dynamic")
    first: Dict[str, Any] = updater.state_dict()
    for _ in range(3):
        updater.update()
    before: Dict[str, Any] = updater.state_dict()
    monkeypatch.setattr(updater.scaling.guard, "undo_window", interrupted)
    with pytest.raises(KeyboardInterrupt):
        updater.update()
    if then == "read":
        assert updater.state_dict() == before
    elif then == "load":
        updater.load_state_dict(first)
        updater.update()
        assert updater.iteration == 1
    else:
        updater.scale = 2.0
        updater.update()
        assert (updater.scale, updater.iteration) == (2.0, 4)
