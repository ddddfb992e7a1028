# SPDX-License-Identifier: Apache-2.0
"""An update that is broken off, at any moment and by whatever is called in it, has not begun, or is over."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, Callable, Dict, Type

import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, Method, Needs, Precision
from tests.worlds.interruptions import Interrupt, Moments, Training, differences
from tests.worlds.trainings import AS_THE_BASELINE

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
    interrupt_everywhere(after, every=127)


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
    "recorder": lambda fuse: Training(config=AdaLossConfig(recorder=fuse.interrupt)),
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
