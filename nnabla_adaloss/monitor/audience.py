# SPDX-License-Identifier: Apache-2.0
"""Delivery of events to the monitors that have methods for them; exceptions in monitors are contained."""

from __future__ import annotations

import logging
import traceback
from contextlib import suppress
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple, Type, Union

from ..core.validation import positive_integer
from ..errors import warn
from .events import METHODS, Event, LayerScaled, Monitor, UpdateEnded

logger = logging.getLogger("nnabla_adaloss")


class Audience:
    """All monitors of a training; TypeError or ValueError if one cannot receive events."""

    def __init__(self, monitors: Sequence[Any]) -> None:
        # For each kind of event: monitor, its method, and the period of the calls in iterations.
        self._listeners: Dict[Type[Any], List[Tuple[Any, Callable[[Any], Any], int]]] = {
            kind: [] for kind in METHODS
        }
        self._failed: Set[int] = set()
        self.training_began = False  # set by those that send `TrainingBegan`
        for monitor in monitors:
            every = positive_integer(f"every of {type(monitor).__name__}", getattr(monitor, "every", 1))
            methods = {
                kind: method
                for kind, name in METHODS.items()
                if callable(method := getattr(monitor, name, None))
                # Methods of the base class do nothing.
                and getattr(method, "__func__", None) is not getattr(Monitor, name)
            }
            if not methods:
                instead = f"it must have a method of {', '.join(METHODS.values())}"
                if type(monitor).__module__ == "nnabla.monitor":
                    instead = "give a Recorder(), and write its recording with to_monitor_series(path)"
                raise TypeError(f"monitors contains {monitor!r}, which receives no events: {instead}")
            for kind, listeners in self._listeners.items():
                method = methods.get(kind, methods.get(Event))
                if method is not None:
                    periodic = kind in (LayerScaled, UpdateEnded)
                    listeners.append((monitor, method, every if periodic else 1))

    def wants(self, kind: Type[Any], iteration: int) -> bool:
        """True if a monitor wants events of this kind in this iteration."""
        return any(not iteration % every for _, _, every in self._listeners[kind])

    def looks(self, iteration: int) -> bool:
        """True if a monitor reads the arrays of layers in this iteration."""
        listeners = self._listeners[LayerScaled]
        return any(not iteration % every and getattr(one, "looks", True) for one, _, every in listeners)

    def tell(self, event: Event) -> None:
        """Call the monitors that want the event; of each, log only the first exception."""
        for monitor, method, every in self._listeners[type(event)]:
            if event.iteration % every:
                continue
            try:
                method(event)
            except Exception as error:
                # A monitor must not stop a training that has run for days.
                if id(monitor) not in self._failed:
                    self._failed.add(id(monitor))
                    where = f"{type(event).__name__} in iteration {event.iteration}"
                    message = f"monitor {type(monitor).__name__} raised an exception for {where}"
                    # Not repr(error), which may raise, too; the log may raise as well.
                    text = traceback.format_exception_only(type(error), error)[-1].strip()
                    warn(f"{message}: {text}; training goes on")
                    with suppress(Exception):
                        logger.exception("%s; training goes on", message)


def audience_of(monitors: Union[Sequence[Any], Audience]) -> Optional[Audience]:
    """The audience of `monitors`, which may be one already; None for no monitors."""
    if isinstance(monitors, Audience):
        return monitors
    if not isinstance(monitors, (list, tuple)):
        kind = type(monitors).__name__
        raise TypeError(f"monitors must be a list of monitors, got {kind}: give [{kind}(...)]")
    return Audience(monitors) if monitors else None
