# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
import re
from typing import Any, List, get_args

import pytest

from nnabla_adaloss import LossScaleWarning
from nnabla_adaloss.monitor import Audience, Event, Monitor, ScaleChanged, UpdateEnded, audience_of


class Listening:
    """Not of the class `Monitor`, with two of its methods."""

    def __init__(self, every: int = 1) -> None:
        self.every = every
        self.heard: List[Any] = []

    def on_scale_changed(self, event: ScaleChanged) -> None:
        self.heard.append(event)

    def on_update_ended(self, event: UpdateEnded) -> None:
        self.heard.append(event)


def ended(iteration: int) -> UpdateEnded:
    return UpdateEnded(iteration, True, "updated", 8.0, 0, 0.5)


def tell_all(audience: Audience, events: List[Any]) -> None:
    for event in events:
        audience.tell(event)


def test_each_kind_of_event_has_a_method_that_does_nothing() -> None:
    for kind in get_args(Event):
        name = "on_" + re.sub("(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()
        assert getattr(Monitor(), name)(None) is None
        hears = type("Hears", (), {name: lambda self, event: None})()
        assert [other for other in get_args(Event) if Audience([hears]).wants(other, 1)] == [kind]


def test_periodic_events_are_told_in_every_nth_iteration_and_others_always() -> None:
    often, rarely = Listening(), Listening(every=3)
    audience = Audience([often, rarely])
    for iteration in range(1, 7):
        audience.tell(ended(iteration))
        audience.tell(ScaleChanged(iteration, 8.0, 16.0))
    assert len(often.heard) == 12
    assert [e.iteration for e in rarely.heard if isinstance(e, UpdateEnded)] == [3, 6]
    assert [e.iteration for e in rarely.heard if isinstance(e, ScaleChanged)] == [1, 2, 3, 4, 5, 6]


def test_what_nobody_wants_is_not_wanted() -> None:
    class Scales(Monitor):
        every = 2

        def on_scale_changed(self, event: ScaleChanged) -> None:
            pass

    audience = Audience([Scales()])
    assert audience.wants(ScaleChanged, 1)
    assert not audience.wants(UpdateEnded, 2)
    audience = Audience([Scales(), Listening(every=2)])
    assert [audience.wants(UpdateEnded, i) for i in (1, 2, 3)] == [False, True, False]


def test_an_exception_is_reported_once_for_each_monitor(caplog: pytest.LogCaptureFixture) -> None:
    class Full(Monitor):
        def __init__(self) -> None:
            self.calls = 0

        def on_update_ended(self, event: UpdateEnded) -> None:
            self.calls += 1
            raise OSError("no space left")

    first, second, well = Full(), Full(), Listening()
    audience = Audience([first, second, well])
    caplog.set_level(logging.ERROR, logger="nnabla_adaloss")
    with pytest.warns(LossScaleWarning) as warned:
        tell_all(audience, [ended(iteration) for iteration in range(4)])
    assert (first.calls, second.calls, len(well.heard)) == (4, 4, 4)
    told = "monitor Full raised an exception for UpdateEnded in iteration 0"
    assert [r.getMessage() for r in caplog.records] == [f"{told}; training goes on"] * 2
    assert "no space left" in caplog.text
    assert [str(w.message) for w in warned] == [f"{told}: OSError('no space left'); training goes on"] * 2


def test_an_interruption_is_no_failure() -> None:
    class Interrupted(Monitor):
        def on_update_ended(self, event: UpdateEnded) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Audience([Interrupted()]).tell(ended(1))


def test_no_monitors_are_no_audience() -> None:
    assert audience_of([]) is None
    assert isinstance(audience_of((Listening(),)), Audience)


@pytest.mark.parametrize(
    ("monitors", "error", "message"),
    [
        ([print], TypeError, "has none of the methods on_layer_scaled, on_overflowed"),
        ([Monitor()], TypeError, "has none of the methods"),
        (Listening(), TypeError, "monitors must be a list of monitors, got Listening"),
        ([Listening(every=0)], ValueError, "every=0 of Listening must be 1 or more"),
        ([Listening(every=1.5)], TypeError, "every of Listening=1.5 must be an integer"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_monitor_is_refused(monitors: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        audience_of(monitors)
