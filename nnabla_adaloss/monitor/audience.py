# SPDX-License-Identifier: Apache-2.0
"""Hands events to the monitors that want them, and keeps their exceptions from the training."""

from __future__ import annotations

import logging
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Type, Union

from ..core.validation import integer
from ..errors import warn
from .events import (
    BatchRepeated,
    BatchThrownAway,
    Event,
    LayerScaled,
    Overflowed,
    ScaleChanged,
    UpdateEnded,
)
from .monitor import Monitor

logger = logging.getLogger("nnabla_adaloss")

METHODS: Dict[Type[Any], str] = {
    LayerScaled: "on_layer_scaled",
    Overflowed: "on_overflowed",
    BatchRepeated: "on_batch_repeated",
    BatchThrownAway: "on_batch_thrown_away",
    ScaleChanged: "on_scale_changed",
    UpdateEnded: "on_update_ended",
}
"""The method that takes each kind of event."""


class _Listener(NamedTuple):
    monitor: Any
    method: Callable[[Any], Any]
    every: int


class Audience:
    """All monitors of a training.

    Args:
        monitors: objects with some of the methods of `Monitor`.

    Raises:
        TypeError: one has none of them, or `every` is no integer.
        ValueError: `every` is less than 1.
    """

    def __init__(self, monitors: Sequence[Any]) -> None:
        self._listeners: Dict[Type[Any], List[_Listener]] = {kind: [] for kind in METHODS}
        self._failed: Set[int] = set()
        for monitor in monitors:
            self._add(monitor)

    def _add(self, monitor: Any) -> None:
        every = integer(f"every of {type(monitor).__name__}", getattr(monitor, "every", 1))
        if every < 1:
            raise ValueError(f"every={every} of {type(monitor).__name__} must be 1 or more")
        found = False
        for kind, name in METHODS.items():
            method = getattr(monitor, name, None)
            # What does nothing need not be called.
            if callable(method) and getattr(method, "__func__", None) is not getattr(Monitor, name):
                periodic = kind in (LayerScaled, UpdateEnded)
                self._listeners[kind].append(_Listener(monitor, method, every if periodic else 1))
                found = True
        if not found:
            raise TypeError(
                f"monitors contains {monitor!r}, which has none of the methods {', '.join(METHODS.values())}"
            )

    def wants(self, kind: Type[Any], iteration: int) -> bool:
        """Whether a monitor wants events of this kind in this iteration."""
        return any(not iteration % listener.every for listener in self._listeners[kind])

    def tell(self, event: Event) -> None:
        """Call the monitors that want the event. Each one's first exception is reported."""
        for listener in self._listeners[type(event)]:
            if event.iteration % listener.every:
                continue
            try:
                listener.method(event)
            except Exception as error:
                # A monitor must not end a training of days.
                if id(listener.monitor) not in self._failed:
                    self._failed.add(id(listener.monitor))
                    self._report(listener.monitor, event, error)

    def _report(self, monitor: Any, event: Event, error: Exception) -> None:
        name, kind = type(monitor).__name__, type(event).__name__
        message = f"monitor {name} raised an exception for {kind} in iteration {event.iteration}"
        logger.exception("%s; training goes on", message)
        warn(f"{message}: {error!r}; training goes on")


def audience_of(monitors: Union[Sequence[Any], Audience]) -> Optional[Audience]:
    """The audience of `monitors`, which may be one already; None for no monitors.

    Raises:
        TypeError, ValueError: one of them is no monitor.
    """
    if isinstance(monitors, Audience):
        return monitors
    if not isinstance(monitors, (list, tuple)):
        raise TypeError(f"monitors must be a list of monitors, got {type(monitors).__name__}")
    return Audience(monitors) if monitors else None
