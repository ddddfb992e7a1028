# SPDX-License-Identifier: Apache-2.0
"""Access to parameters from other threads and from signal handlers, between updates."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import nullcontext
from typing import Any, Callable, ContextManager, Deque


class Idle:
    """Runs callbacks between updates; each of these runs `with idle.update():`, then calls `drain`."""

    def __init__(self) -> None:
        # Held while parameters are swapped or changed. It is for other threads: it does not keep out a signal
        # handler, which runs in the thread that holds it.
        self.lock = threading.RLock()
        # Locks alone show whether an update runs: a signal may interrupt Python between any two lines,
        # but neither a lock nor the beginning and the end of its `with` block.
        self._running = threading.Lock()
        self._calling = threading.Lock()
        self._waiting: Deque[Callable[[], Any]] = deque()

    def when_idle(self, callback: Callable[[], Any]) -> None:
        """Call `callback` now if no update is running, else in the thread of the update when it has ended."""
        if not callable(callback):
            raise TypeError(f"callback must be callable without arguments, got {type(callback).__name__}")
        self._waiting.append(callback)
        # An update that ends between these two lines calls it, or leaves that to us.
        self.drain()

    def update(self) -> ContextManager[Any]:
        """Lock to hold while an update runs, perhaps within another one."""
        return nullcontext() if self._running.locked() else self._running

    def drain(self) -> None:
        """Call what is waiting, unless an update is running."""
        # One at a time: a signal that arrives while a callback runs leaves its callback to this loop.
        while self._waiting and not self._running.locked() and not self._calling.locked():
            # An update that another thread begins now waits before its first forward.
            with self.lock, self._calling:
                if self._waiting:
                    self._waiting.popleft()()
