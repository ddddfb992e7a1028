# SPDX-License-Identifier: Apache-2.0
"""An update that is broken off, at any moment and by whatever is called in it, has not begun, or is over.

Parameters are read by other threads, and in handlers of signals, when none is swapped.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, Callable, Dict, Iterator, Optional, Tuple, Type

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScalingUpdater, Method, Needs, Precision
from tests.worlds.interruptions import Interrupt, Moments, Training, differences
from tests.worlds.methods import LooksBack
from tests.worlds.ranks import Pair
from tests.worlds.trainings import AS_THE_BASELINE, training, updater_of, updater_on
from tests.worlds.values import FLOAT, HALF, assert_equal, data, snapshot

# How many updates there were before: the next one is the first; an ordinary one; one that chooses scales.
FIRST, ORDINARY, CHOOSING = 0, 3, 8
BURST = {ORDINARY + 1: 60.0}
"""Targets that make the gradients of an ordinary update overflow."""


def compare(training: Training, before: Dict[str, Any], done: Dict[str, Any], end: Dict[str, Any]) -> str:
    """Of a training that has broken off an update: what is neither as before it nor as when it is done, and
    what differs from the end two updates later.
    """
    found, called = training.everything(), []
    training.updater.when_idle(lambda: called.append(True))
    is_over = not differences(found, done)
    half = [] if is_over else differences(found, before)
    left = differences(training.train(2 if is_over else 3).everything(), end)
    return f"{half} at once, {left} in the end" if half or left or not called else ""


def interrupt_everywhere(after: int, every: int, **options: Any) -> None:
    """Interrupt an update at one of so many of its moments, and go on."""
    # What is done once in a process has no moments to interrupt afterwards.
    Training(**options).train(after + 1)
    reference = Training(**options).train(after)
    before, moments = reference.everything(), Moments(0)
    moments.run(reference.updater.update)
    states = before, reference.everything(), reference.train(2).everything()
    wrong = {}
    for stop in range(1, moments.count + 1, every):
        training, now = Training(**options).train(after), Moments(stop)
        with pytest.raises(Interrupt):
            now.run(training.updater.update)
        wrong[now.place] = compare(training, *states)
    assert len(wrong) > 10
    assert not {place: what for place, what in wrong.items() if what}


@pytest.mark.parametrize("after", [ORDINARY, CHOOSING])
def test_an_interrupt_changes_nothing(after: int) -> None:
    interrupt_everywhere(after, every=167)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("after", "every", "options"),
    [
        (ORDINARY, 2, {"storage": None}),
        (CHOOSING, 7, {}),
        (ORDINARY, 11, {"accum_grad": 2}),
        (FIRST, 37, {}),
        (ORDINARY, 67, {"sizes": BURST}),
        (ORDINARY, 83, {"sizes": BURST, **AS_THE_BASELINE, "trains_all": True}),
        (ORDINARY, 17, {"weights": {ORDINARY + 1: 1e-6}}),
        (CHOOSING, 29, {"weights": {CHOOSING - 2: 0.0, CHOOSING + 1: 1e-6}, "accum_grad": 2}),
        (ORDINARY, 29, {"sizes": {ORDINARY + 1: np.nan}, "on_nonfinite_loss": "skip"}),
        (ORDINARY, 29, {"config": AdaLossConfig(delay=0, loss_scale_method="approx_range")}),
        (ORDINARY, 29, {"storage": Precision("float8_e4m3", "float8_e5m2", stochastic_seed=0)}),
    ],
)
def test_an_interrupt_at_any_moment_changes_nothing(after: int, every: int, options: Dict[str, Any]) -> None:
    interrupt_everywhere(after, every, **options)


class Planned(Exception):
    """What a callback raises."""


class Fuse:
    """A callback that does nothing until it is lit, and then raises once."""

    def __init__(self) -> None:
        self.lit = False

    def __call__(self, *_: Any) -> None:
        self._burn(Planned)

    def interrupt(self, *_: Any) -> None:
        """Raise what is not caught where training goes on whatever is raised."""
        self._burn(Interrupt)

    def _burn(self, error: Type[BaseException]) -> None:
        if self.lit:
            self.lit = False
            raise error


@dataclass(frozen=True)
class Fused(Method):
    """A method of the user's own that calls a fuse."""

    needs = Needs.STATISTICS
    fuse: Fuse = field(default_factory=Fuse)

    def scale(self, g: Any, W: Any, *, range: Any, fan_in: float) -> float:
        self.fuse()
        return 2.0


def with_feeder(fuse: Fuse, **options: Any) -> Training:
    training = Training(**options)
    feed = training.updater.data_feeder

    def fused() -> None:
        feed()
        fuse()

    training.updater.data_feeder = fused
    return training


def with_monitor(fuse: Fuse, event: str) -> Training:
    return Training(monitors=[SimpleNamespace(**{event: fuse.interrupt})])


CALLBACKS: Dict[str, Callable[[Fuse], Training]] = {
    "data feeder": with_feeder,
    "data feeder of two batches": partial(with_feeder, accum_grad=2),
    "on_gradients": lambda fuse: Training(on_gradients=fuse),
    "hook of forward": lambda fuse: Training(function_post_hook=(fuse, None)),
    "hook of backward": lambda fuse: Training(function_pre_hook=(None, fuse)),
    "method": lambda fuse: Training(config=AdaLossConfig(loss_scale_method=Fused(fuse), measure_every=1)),
    "monitor of layers": partial(with_monitor, event="on_layer_scaled"),
    "monitor of updates": partial(with_monitor, event="on_update_ended"),
}


@pytest.mark.parametrize("callback", CALLBACKS)
def test_an_exception_in_a_callback_changes_nothing(callback: str) -> None:
    """The batch is undone, and counts for nothing; what is called when an update is over finds it so."""
    fuse = Fuse()
    reference = CALLBACKS[callback](fuse).train(CHOOSING)
    before, done = reference.everything(), reference.train(1).everything()
    end = reference.train(2).everything()
    training = CALLBACKS[callback](fuse).train(CHOOSING)
    fuse.lit = True
    with pytest.raises((Planned, Interrupt)):
        training.updater.update()
    expected = done if callback == "monitor of updates" else before
    assert not differences(training.everything(), expected)
    assert not compare(training, before, done, end)


@pytest.mark.parametrize("storage", ["random", "native"])
@pytest.mark.parametrize("graph", ["last", "rebuilt", "known", "loaded"])
def test_an_interrupted_update_takes_nothing_from_the_topologies(graph: str, storage: str) -> None:
    """Of the last graph, built again or not; of an earlier one; or of one that waits in a loaded state."""

    def unrolled(steps: int) -> nn.Variable:
        h, rng = data(4, 3), np.random.RandomState(0)
        with nn.context_scope(HALF if storage == "native" else FLOAT):
            for _ in range(steps):
                h = F.tanh(PF.affine(h, 3, name="h", rng=rng))
            return F.mean(PF.affine(h, 2, name="b", rng=rng) ** 2)

    def trained(*, interrupted: bool) -> Any:
        nn.clear_parameters()
        fuse = Fuse()
        options = {
            "storage": None if storage == "native" else Precision("bfloat16", stochastic_seed=0),
            "config": AdaLossConfig(loss_scale_method=LooksBack(), delay=1, measure_every=3),
            "on_gradients": fuse,
        }
        updater = updater_of(unrolled(2), **options)
        for steps in (3, 2, 3, 2, 3):
            updater.loss = unrolled(steps)
            updater.update()
        if graph == "loaded":
            state, updater = updater.state_dict(), updater_of(unrolled(3), **options)
            updater.load_state_dict(state)
        if graph != "last":
            updater.loss = unrolled(3 if graph == "rebuilt" else 2)
        fuse.lit = interrupted
        while fuse.lit:
            with pytest.raises(Planned):
                updater.update()
        found = []
        for steps in (2, 3, 2, 3):
            updater.update()
            found.append((updater.state_dict(), [v.tobytes() for v in snapshot().values()]))
            updater.loss = unrolled(steps)
        return found

    assert trained(interrupted=True) == trained(interrupted=False)


def test_an_iteration_that_a_feeder_ended_begins_again_with_its_batches_while_ranks_wait() -> None:
    train, asked = training(), []

    def feed() -> None:
        asked.append((updater.iteration, updater.counters.fed))
        if len(asked) == 4:
            raise KeyError
        train.feed()

    updater = updater_on(train._replace(feed=feed), comm=Pair(), accum_grad=2)
    updater.update()
    before = snapshot()
    with pytest.raises(KeyError):
        updater.update()
    assert_equal(snapshot(), before)
    assert updater.update().updated
    assert asked == [(1, 0), (1, 1), (2, 2), (2, 3), (2, 2), (2, 3)]
    assert (updater.counters.updates, updater.counters.batches, updater.counters.fed) == (2, 4, 4)


def feeding(train: Any, fuse: Fuse, burns: int) -> Any:
    """The training, with a fuse in the feeder that is lit for one batch."""
    batches = [0]

    def feed() -> None:
        fuse.lit = batches[0] == burns
        batches[0] += 1
        fuse()
        train.feed()

    return train._replace(feed=feed)


def test_retries_of_an_iteration_that_a_feeder_ended_count_while_ranks_wait() -> None:
    train = feeding(training(factors={1: 2.0**30}), Fuse(), burns=2)
    updater = updater_on(train, comm=Pair(), on_overflow="next")
    updater.update()
    with pytest.raises(Planned):
        updater.update()
    result = updater.update()
    assert (result.updated, result.retries) == (True, 1)


@pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")
def test_what_a_lost_batch_has_shown_is_known_after_a_bad_one_and_an_interruption() -> None:
    train = feeding(training(factors={3: 2.0**12}, nan=[4]), Fuse(), burns=5)
    updater = updater_on(train, on_overflow="next", on_nonfinite_loss="skip")
    updated = [updater.update().updated for _ in range(4)]
    assert updated == [True, True, True, False]
    assert updater.counters.lost == {"overflow": 1, "nonfinite_loss": 1}
    before = updater.state_dict()
    assert before["scaling"]["components"]["lost"]
    with pytest.raises(Planned):
        updater.update()
    assert updater.state_dict() == before


def test_a_solver_that_raises_changes_nothing() -> None:
    training = Training().train(ORDINARY)
    before, solver = training.everything(), training.updater.solver

    class Failing:
        def __getattr__(self, name: str) -> Any:
            return getattr(solver, name)

        def update(self) -> None:
            raise Planned

    training.updater.solver = Failing()
    with pytest.raises(Planned):
        training.updater.update()
    training.updater.solver = solver
    assert not differences(training.everything(), before)
    assert training.updater.update().updated


def test_a_second_interrupt_is_made_up_for() -> None:
    """One that comes while the first is being answered."""
    fuse, stop = Fuse(), 1
    reference = with_feeder(fuse).train(ORDINARY)
    end = reference.train(3).everything()
    while True:
        training, moments = with_feeder(fuse).train(ORDINARY), Moments(stop)
        fuse.lit = True
        with pytest.raises((Planned, Interrupt)):
            moments.run(training.updater.update)
        fuse.lit = False
        assert not differences(training.train(3).everything(), end), moments.place
        if moments.place is None:
            break
        stop += 29


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


@pytest.fixture
def _timer() -> Iterator[None]:
    """A timer raises KeyboardInterrupt, by the handler that Ctrl-C has."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)


def interrupt(call: Callable[[], object], after: float) -> None:
    """Repeat `call` until a KeyboardInterrupt, due in `after` seconds, ends it.

    Python swallows an exception that a signal raises inside a finalizer or a weak reference's callback. As
    with a user, the next attempt comes a second later.
    """
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012  # the timer may end any of the calls
        signal.setitimer(signal.ITIMER_REAL, after, 1.0)
        while True:
            call()
    signal.setitimer(signal.ITIMER_REAL, 0.0)


def updater_with(storage: Optional[str], delay: int) -> AdaptiveLossScalingUpdater:
    rng = np.random.RandomState(0)
    h = data(4, 5)
    for name in "abcdef":
        h = h + F.tanh(PF.affine(h, 5, name=name, rng=rng))
    h = F.tanh(PF.affine(F.tanh(PF.affine(h, 5, name="twice", rng=rng)), 5, name="twice"))
    # Every layer is scaled, so that in every layer something is swapped.
    config = AdaLossConfig(loss_scale_method="fixed", fixed_loss_scale=4.0, use_bound=False, delay=delay)
    return updater_of(F.mean(h**2), solver=S.Momentum(0.01), storage=storage, config=config)


def arrays() -> Dict[str, Tuple[Any, Any]]:
    return {name: (v.data, v.grad) for name, v in nn.get_parameters().items()}


def duration(call: Callable[[], object]) -> float:
    call()
    began = time.perf_counter()
    for _ in range(5):
        call()
    return (time.perf_counter() - began) / 5


@pytest.mark.slow
@pytest.mark.gate
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs POSIX timers")
# Where Ctrl-C lands in a callback of the garbage collector, Python can only say so.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("_timer")
@pytest.mark.parametrize(("storage", "delay"), [(None, 0), ("float16", 0), ("float16", 1)])
def test_interrupted_at_random_moments(storage: Optional[str], delay: int) -> None:
    updater = updater_with(storage, delay)
    longest, original = 2.5 * duration(updater.update), arrays()
    rng = random.Random(delay)
    for _ in range(25):
        interrupt(updater.update, rng.uniform(1e-5, longest))
        assert arrays() == original
    assert updater.update().updated
