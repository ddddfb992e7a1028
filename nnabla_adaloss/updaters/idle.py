# SPDX-License-Identifier: Apache-2.0
"""Access to parameters and state from other threads and from signal handlers, between updates."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import contextmanager, nullcontext
from typing import Any, Callable, ContextManager, Deque, Iterator, List


class Idle:
    """Keeps updates, callbacks, and saving and loading apart: each has the state for itself, as a whole."""

    def __init__(self) -> None:
        # Held while parameters are swapped or changed. It is for other threads: it does not keep out a signal
        # handler, which runs in the thread that holds it.
        self.lock = threading.RLock()
        # Held as a whole by an update, a callback, and saving and loading; taken before `lock`. Updates wait
        # for it, all others only try.
        self.exclusive = threading.RLock()
        # Locks alone show what the thread that holds `exclusive` is doing: a signal may interrupt Python
        # between any two lines, but neither a lock nor the beginning and the end of its `with` block.
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

    def running(self) -> ContextManager[Any]:
        """Lock to hold, within `exclusive`, while the state changes, perhaps within another update."""
        return nullcontext() if self._running.locked() else self._running

    @contextmanager
    def between_updates(self, caller: str) -> Iterator[None]:
        """Keep updates out, then call what waits; RuntimeError, which names `caller`, within an update."""
        try:
            with self._tried() as is_idle:
                if not is_idle:
                    raise RuntimeError(
                        f"{caller} while an update, or a callback of another thread, is running: parameters "
                        f"and state may be of no iteration. Use {caller} in a callback of updater.when_idle"
                    )
                yield
        finally:
            self.drain()

    def drain(self) -> None:
        """Call what is waiting, unless an update is running, at whose end it is called."""
        while self._waiting:
            with self._tried() as is_idle:
                # One at a time: a signal that arrives while a callback runs leaves its callback to this loop.
                if not is_idle or self._calling.locked():
                    return
                with self.lock, self._calling:
                    if self._waiting:
                        self._waiting.popleft()()

    @contextmanager
    def _tried(self) -> Iterator[bool]:
        """Hold `exclusive` unless another thread does; whether it is held, and no update is running."""
        held: List[bool] = []
        try:
            # One call into C: no signal can come between the lock and the note that it is held.
            held.extend(map(self.exclusive.acquire, (False,)))
            yield held[0] and not self._running.locked()
        finally:
            if any(held):
                self.exclusive.release()
