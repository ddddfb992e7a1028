# SPDX-License-Identifier: Apache-2.0
"""Access to parameters and state between updates, from other threads and signal handlers."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import contextmanager
from operator import methodcaller
from typing import Any, Callable, ContextManager, Deque, FrozenSet, Iterator, List, Optional, Sequence
from weakref import WeakKeyDictionary

_TAKE, _TRY = methodcaller("acquire"), methodcaller("acquire", False)


class Turn:
    """Locks that only one of the updaters with common arrays or solvers holds at a time."""

    def __init__(self) -> None:
        # Held while parameters change. It keeps out other threads, not a signal handler in the holding one.
        self.lock = threading.RLock()
        # Held in updates, callbacks, saves and loads; taken before `lock`. Updates wait for it, others try.
        self.exclusive = threading.RLock()
        # Only locks can show the work of the holder of `exclusive`: a signal may interrupt Python between
        # any two lines, but not inside a lock or at the ends of its `with` block.
        self.running = threading.Lock()
        self.calling = threading.Lock()  # no callback may run meanwhile
        self.waiting: Deque[Callable[[], Any]] = deque()

    def drain(self) -> None:
        """Call waiting callbacks, unless an update is running, whose end calls them."""
        # Twice, for those that came meanwhile. Later ones wait for the next update: training must go on.
        for _ in range(2):
            for _ in range(len(self.waiting)):
                with _tried([self]) as busy:
                    # A signal that arrives while a callback runs leaves its callback to this loop.
                    if busy or self.calling.locked():
                        return
                    with self.calling:
                        if self.waiting:
                            self.waiting.popleft()()


class Idle:
    """Keeps updates, callbacks, saves and loads apart: each has exclusive access to a consistent state."""

    def __init__(self, turns: Sequence[Turn] = ()) -> None:
        self.turns = tuple(turns) or (Turn(),)
        self.lock = _together([turn.lock for turn in self.turns])
        self.exclusive = _together([turn.exclusive for turn in self.turns])

    def when_idle(self, callback: Callable[[], Any]) -> None:
        """Call `callback` now if no update is running, else after it, in its thread."""
        if not callable(callback):
            raise TypeError(f"callback must be callable without arguments, got {type(callback).__name__}")

        def attempt() -> None:
            with _tried(self.turns) as busy:
                if not busy:
                    with self.lock:
                        callback()
            if busy:
                wait_for(busy)

        # The callback waits in the queue of one turn at a time: when that one is free, `attempt` calls it, or
        # has it wait for the next turn that is busy.
        def wait_for(turn: Turn) -> None:
            turn.waiting.append(attempt)
            # Calls it now if the turn is free. An update that ends between these two lines may have done so.
            turn.drain()

        wait_for(self.turns[0])

    def running(self) -> ContextManager[Any]:
        """Lock to hold, within `exclusive`, while the state changes, perhaps within another update."""
        # A data feeder or hook may call another updater's `update`, which shares turns that run already.
        return _together([turn.running for turn in self.turns if not turn.running.locked()])

    @contextmanager
    def between_updates(self, caller: str) -> Iterator[None]:
        """Keep updates out, then run waiting callbacks; RuntimeError, naming `caller`, within an update."""
        try:
            with _tried(self.turns) as busy:
                if busy:
                    raise RuntimeError(
                        f"{caller} while an update, or a callback of another thread, is running: parameters "
                        f"and state may be of no iteration. Use {caller} in a callback of updater.when_idle"
                    )
                # Callbacks wait for the end of the whole block, of which this may be a part.
                with _together([turn.calling for turn in self.turns if not turn.calling.locked()]):
                    yield
        finally:
            self.drain()

    def drain(self) -> None:
        """Call waiting callbacks, unless an update is running, whose end calls them."""
        for turn in self.turns:
            turn.drain()


_living: WeakKeyDictionary[Idle, FrozenSet[int]] = WeakKeyDictionary()
"""Keys of the arrays and solvers that each updater of this process uses."""
_joining = threading.RLock()


def idle_of(used: FrozenSet[int]) -> Idle:
    """Make the `Idle` of another updater, which excludes all that use any of the same."""
    with _joining:
        sharing = [idle for idle, others in list(_living.items()) if not used.isdisjoint(others)]
        # The same order everywhere avoids deadlocks.
        result = Idle(sorted({turn for idle in sharing for turn in idle.turns}, key=id))
        _living[result] = used
    return result


@contextmanager
def _tried(turns: Sequence[Turn]) -> Iterator[Optional[Turn]]:
    """Try to hold all turns; return the first that another thread holds, or in which an update runs."""
    locked: List[bool] = []
    try:
        # One call into C: no signal can come between taking the locks and noting it.
        locked.extend(map(_TRY, [turn.exclusive for turn in turns]))
        yield next((one for one, own in zip(turns, locked) if not own or one.running.locked()), None)
    finally:
        for turn, own in zip(turns, locked):
            if own:
                turn.exclusive.release()


class _Together:
    """Several locks as one, taken in their order."""

    def __init__(self, locks: Sequence[Any]) -> None:
        self._locks = locks

    def __enter__(self) -> None:
        locked: List[bool] = []
        try:
            locked.extend(map(_TAKE, self._locks))
        except BaseException:  # from a signal handler, while it waits
            for lock, _ in zip(self._locks, locked):
                lock.release()
            raise

    def __exit__(self, *error: object) -> None:
        for lock in self._locks:
            lock.release()


def _together(locks: Sequence[Any]) -> ContextManager[Any]:
    return locks[0] if len(locks) == 1 else _Together(locks)
