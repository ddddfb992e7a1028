# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
import re
from typing import Any, List

import pytest

from nnabla_adaloss import LossScaleWarning, Monitor, ScaleChanged, UpdateEnded
from nnabla_adaloss.monitor import events
from nnabla_adaloss.monitor.audience import Audience, audience_of
from nnabla_adaloss.monitor.events import Event


class Listening:
    """Not of the class `Monitor`, with two of its methods."""

    def __init__(self, every: Any = 1) -> None:
        self.every = every
        self.heard: List[Any] = []

    def on_scale_changed(self, event: ScaleChanged) -> None:
        self.heard.append(event)

    def on_update_ended(self, event: UpdateEnded) -> None:
        self.heard.append(event)


class Failing(Monitor):
    """Raises, and counts how often."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.calls = error, 0

    def on_update_ended(self, event: UpdateEnded) -> None:
        self.calls += 1
        raise self.error


def ended(iteration: int) -> UpdateEnded:
    return UpdateEnded(iteration, True, "updated", 8.0, 0, 0.5)


KINDS = [kind for kind in events.METHODS if kind is not Event]


def test_every_event_that_is_declared_has_a_method_that_does_nothing() -> None:
    declared = [one for one in vars(events).values() if getattr(one, "__module__", "") == events.__name__]
    assert set(KINDS) == {one for one in declared if hasattr(one, "_fields") and hasattr(one, "iteration")}
    for kind in KINDS:
        name = "on_" + re.sub("(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()
        assert getattr(Monitor(), name)(None) is None
        hears = type("Hears", (Monitor,), {name: lambda self, event: None})()
        assert [other for other in KINDS if Audience([hears]).wants(other, 1)] == [kind]


class Catching(Listening):
    """Also of other events."""

    def on_event(self, event: Event) -> None:
        self.heard.append([event])


def test_events_without_a_method_of_their_own_come_to_on_event() -> None:
    catching = Catching()
    audience = Audience([catching])
    assert all(audience.wants(kind, 1) for kind in KINDS)
    lost = events.BatchThrownAway(2, "overflow", (), 1)
    for event in (ended(1), lost):
        audience.tell(event)
    assert catching.heard == [ended(1), [lost]]


def test_periodic_events_are_told_in_every_nth_iteration_and_others_always() -> None:
    often, rarely = Listening(), Listening(every=3)
    audience = Audience([often, rarely])
    for iteration in range(1, 7):
        audience.tell(ended(iteration))
        audience.tell(ScaleChanged(iteration, 8.0, 16.0))
    assert len(often.heard) == 12
    assert [e.iteration for e in rarely.heard if isinstance(e, UpdateEnded)] == [3, 6]
    assert [e.iteration for e in rarely.heard if isinstance(e, ScaleChanged)] == [1, 2, 3, 4, 5, 6]
    for kind, wanted in ((UpdateEnded, [False, False, True]), (ScaleChanged, [True] * 3)):
        assert [Audience([rarely]).wants(kind, i) for i in (1, 2, 3)] == wanted
    assert audience.wants(UpdateEnded, 1)


def test_an_exception_is_reported_once_for_each_monitor(caplog: pytest.LogCaptureFixture) -> None:
    first, second, well = Failing(OSError("no space")), Failing(OSError("no space")), Listening()
    audience = Audience([first, second, well])
    caplog.set_level(logging.ERROR, logger="nnabla_adaloss")
    with pytest.warns(LossScaleWarning) as warned:
        list(map(audience.tell, map(ended, range(4))))
    assert (first.calls, second.calls, len(well.heard)) == (4, 4, 4)
    told = "monitor Failing raised an exception for UpdateEnded in iteration 0"
    assert [r.getMessage() for r in caplog.records] == [f"{told}; training goes on"] * 2
    assert [str(w.message) for w in warned] == [f"{told}: OSError: no space; training goes on"] * 2


class Unprintable(Exception):
    """Raises another when it is told of."""

    def __repr__(self) -> str:
        raise RuntimeError

    __str__ = __repr__


def test_a_failing_report_of_the_failure_does_not_end_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("nnabla_adaloss"), "exception", lambda *_: 1 / 0)
    with pytest.warns(LossScaleWarning, match=r"Unprintable: <exception str\(\) failed>; training goes on"):
        Audience([Failing(Unprintable())]).tell(ended(1))
    with pytest.raises(KeyboardInterrupt):
        Audience([Failing(KeyboardInterrupt())]).tell(ended(1))


def test_no_monitors_are_no_audience() -> None:
    assert audience_of([]) is None
    audience = audience_of((Listening(),))
    assert audience is not None
    assert audience_of(audience) is audience


@pytest.mark.parametrize(
    ("monitors", "error", "message"),
    [
        ([print], TypeError, "must have a method of on_event, on_training_began, on_layer_scaled"),
        ([Monitor()], TypeError, "must have a method of"),
        (Listening(), TypeError, "monitors must be a list of monitors, got Listening"),
        ([Listening(every=0)], ValueError, "every of Listening=0 must be 1 or more"),
        ([Listening(every=1.5)], TypeError, "every of Listening=1.5 must be an integer"),
    ],
)
def test_objects_that_are_not_monitors_are_refused(
    monitors: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        audience_of(monitors)
