# SPDX-License-Identifier: Apache-2.0
"""What a monitor is, and the audience: events go to the monitors that want them, whatever these raise."""

from __future__ import annotations

import logging
import traceback
from contextlib import suppress
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple, Type, Union, get_type_hints

from ..core.validation import positive_integer
from ..errors import warn
from . import events

logger = logging.getLogger("nnabla_adaloss")


class Monitor:
    """Methods that do nothing: override those whose events you want.

    Any object with some of these methods is a monitor, of this class or not. What a monitor raises is
    reported once, and training goes on.

    Attributes:
        every: `on_layer_scaled` and `on_update_ended` are called in iterations whose number is a multiple of
            this. In the others they cost nothing. 1. Other methods are called at every event.

    Example:
        >>> from nnabla_adaloss import Monitor
        >>> class Losses(Monitor):
        ...     every = 10
        ...     def __init__(self):
        ...         self.seen = []
        ...     def on_update_ended(self, event):
        ...         self.seen.append(event.loss)
    """

    every: int = 1

    def on_training_began(self, event: events.TrainingBegan) -> None:
        """The first update is about to begin."""

    def on_layer_scaled(self, event: events.LayerScaled) -> None:
        """A layer's backward ran with a scale of its own; several times per iteration if batches repeat."""

    def on_overflowed(self, event: events.Overflowed) -> None:
        """Gradients were not finite after a pass."""

    def on_batch_repeated(self, event: events.BatchRepeated) -> None:
        """A batch is going to be run again."""

    def on_batch_thrown_away(self, event: events.BatchThrownAway) -> None:
        """A batch, or a window of them, was lost."""

    def on_scale_changed(self, event: events.ScaleChanged) -> None:
        """The global loss scale is another one than before the update."""

    def on_update_ended(self, event: events.UpdateEnded) -> None:
        """An update is over."""


# The method that takes each kind of event.
_METHODS: Dict[Type[Any], str] = {
    get_type_hints(method)["event"]: name for name, method in vars(Monitor).items() if name.startswith("on_")
}


class Audience:
    """All monitors of a training; TypeError or ValueError if one is none."""

    def __init__(self, monitors: Sequence[Any]) -> None:
        # For each kind of event: monitors, their methods, and in every how many iterations these are called.
        self._listeners: Dict[Type[Any], List[Tuple[Any, Callable[[Any], Any], int]]] = {
            kind: [] for kind in _METHODS
        }
        self._failed: Set[int] = set()
        self._began = False
        for monitor in monitors:
            self._add(monitor)

    def _add(self, monitor: Any) -> None:
        every = positive_integer(f"every of {type(monitor).__name__}", getattr(monitor, "every", 1))
        found = False
        for kind, name in _METHODS.items():
            method = getattr(monitor, name, None)
            # What does nothing need not be called.
            if callable(method) and getattr(method, "__func__", None) is not getattr(Monitor, name):
                periodic = kind in (events.LayerScaled, events.UpdateEnded)
                self._listeners[kind].append((monitor, method, every if periodic else 1))
                found = True
        if not found and type(monitor).__module__ == "nnabla.monitor":
            raise TypeError(
                f"monitors contains nnabla's {type(monitor).__name__}, which is told of no events: give a "
                "Recorder(), and write its recording with to_monitor_series(path)"
            )
        if not found:
            raise TypeError(
                f"monitors contains {monitor!r}, which has none of the methods {', '.join(_METHODS.values())}"
            )

    def begins(self) -> bool:
        """True at the first call: nothing has been told yet."""
        began, self._began = self._began, True
        return not began

    def wants(self, kind: Type[Any], iteration: int) -> bool:
        """Whether a monitor wants events of this kind in this iteration."""
        return any(not iteration % every for _, _, every in self._listeners[kind])

    def tell(self, event: events.Event) -> None:
        """Call the monitors that want the event. Each one's first exception is reported."""
        for monitor, method, every in self._listeners[type(event)]:
            if event.iteration % every:
                continue
            try:
                method(event)
            except Exception as error:
                # A monitor must not end a training of days.
                if id(monitor) not in self._failed:
                    self._failed.add(id(monitor))
                    message = (
                        f"monitor {type(monitor).__name__} raised an exception for {type(event).__name__} "
                        f"in iteration {event.iteration}"
                    )
                    # Not its repr(), which may raise, too; nor may the log.
                    told = traceback.format_exception_only(type(error), error)[-1].strip()
                    warn(f"{message}: {told}; training goes on")
                    with suppress(Exception):
                        logger.exception("%s; training goes on", message)


def audience_of(monitors: Union[Sequence[Any], Audience]) -> Optional[Audience]:
    """The audience of `monitors`, which may be one already; None for no monitors."""
    if isinstance(monitors, Audience):
        return monitors
    if not isinstance(monitors, (list, tuple)):
        given = type(monitors).__name__
        raise TypeError(f"monitors must be a list of monitors, got {given}: give [{given}(...)]")
    return Audience(monitors) if monitors else None
