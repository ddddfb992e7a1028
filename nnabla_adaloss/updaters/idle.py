# SPDX-License-Identifier: Apache-2.0
"""When the parameters may be looked at by others: threads, and handlers of signals."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Callable, Deque


class Idle:
    """Tells others when parameters are whole: not swapped for rounded or scaled copies, not half updated.

    An update is a `with` block.

    Attributes:
        lock: held while parameters are swapped or being updated. For threads; a signal handler would find it
            held by its own thread, and gets in.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._running = 0
        self._calling = False
        self._waiting: Deque[Callable[[], Any]] = deque()

    def when_idle(self, callback: Callable[[], Any]) -> None:
        """Call `callback` now if no update is running, else as soon as it has ended, in its thread.

        Raises:
            TypeError: `callback` cannot be called.
        """
        if not callable(callback):
            raise TypeError(f"callback must be callable without arguments, got {type(callback).__name__}")
        self._waiting.append(callback)
        # An update that ends between these two lines finds it, or leaves it to us.
        if not self._running:
            self._drain()

    def __enter__(self) -> None:
        """An update begins, perhaps within another one."""
        self._running += 1

    def __exit__(self, *_: Any) -> None:
        """It has ended, perhaps with an exception; what waits for the end of the outer one is called."""
        self._running -= 1
        if self._waiting and not self._running:
            self._drain()

    def _drain(self) -> None:
        # One at a time: a signal that comes while a callback runs leaves its own to this loop.
        while self._waiting and not self._calling:
            self._calling = True
            try:
                # An update that another thread begins now waits with its first forward.
                with self.lock:
                    if self._waiting:
                        self._waiting.popleft()()
            finally:
                self._calling = False
