# SPDX-License-Identifier: Apache-2.0
"""Access to parameters from other threads and from signal handlers, between updates."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Callable, Deque


class Idle:
    """Runs callbacks when no update is running, so that parameters are neither swapped for copies nor half
    updated. An update is a `with` block.

    Attributes:
        lock: held while parameters are swapped or changed. It is for other threads: it does not keep out a
            signal handler, which runs in the thread that holds it.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._running = 0
        self._calling = False
        self._waiting: Deque[Callable[[], Any]] = deque()

    def when_idle(self, callback: Callable[[], Any]) -> None:
        """Call `callback` now if no update is running, else in the thread of the update when it has ended.

        Raises:
            TypeError: `callback` cannot be called.
        """
        if not callable(callback):
            raise TypeError(f"callback must be callable without arguments, got {type(callback).__name__}")
        self._waiting.append(callback)
        # An update that ends between these two lines calls it, or leaves that to us.
        if not self._running:
            self._drain()

    def __enter__(self) -> None:
        """Begin an update, perhaps within another one."""
        self._running += 1

    def __exit__(self, *_: Any) -> None:
        """End an update, perhaps with an exception; after the outermost one, call what is waiting."""
        self._running -= 1
        if self._waiting and not self._running:
            self._drain()

    def _drain(self) -> None:
        # One at a time: a signal that arrives while a callback runs leaves its callback to this loop.
        while self._waiting and not self._calling:
            self._calling = True
            try:
                # An update that another thread begins now waits before its first forward.
                with self.lock:
                    if self._waiting:
                        self._waiting.popleft()()
            finally:
                self._calling = False
