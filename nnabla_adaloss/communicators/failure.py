# SPDX-License-Identifier: Apache-2.0
"""End of an MPI job when one of its processes cannot go on.

A rank that raises, exits or stalls would leave the other ranks waiting forever.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import textwrap
import threading
import time
from contextlib import contextmanager
from types import TracebackType
from typing import Callable, Iterator, Optional, Tuple, Type


class Watchdog:
    """Calls `on_expiry(description, timeout_s)` when a watched block takes longer than that; None: never."""

    def __init__(self, timeout_s: Optional[float], on_expiry: Callable[[str, float], None]) -> None:
        if timeout_s is not None and not timeout_s > 0:
            raise ValueError(f"`timeout_s` must be positive, got {timeout_s}")
        self._watched: Optional[Tuple[float, Callable[[], str]]] = None
        if timeout_s is not None:
            threading.Thread(target=self._patrol, args=(timeout_s, on_expiry), daemon=True).start()

    @contextmanager
    def watch(self, describe: Callable[[], str]) -> Iterator[None]:
        """Watch the block; `describe` is called only on expiry."""
        # One assignment costs a microsecond; the thread reads it four times per timeout.
        self._watched = (time.monotonic(), describe)
        try:
            yield
        finally:
            self._watched = None

    def _patrol(self, timeout_s: float, on_expiry: Callable[[str, float], None]) -> None:
        while True:
            time.sleep(timeout_s / 4)
            watched = self._watched
            if watched is not None and time.monotonic() - watched[0] > timeout_s:
                on_expiry(watched[1](), timeout_s)


def exit_code_of(error: BaseException) -> int:
    """Exit status of Python after an exception: 0 only after `sys.exit()` without error."""
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return error.code or 0
    return 1


def report(rank: int, message: str) -> None:
    """Write a message to stderr at once, with the rank before every line, as ranks share a terminal."""
    sys.stdout.flush()
    sys.stderr.write(textwrap.indent(message.rstrip("\n") + "\n", f"[rank {rank}] ", lambda line: True))
    sys.stderr.flush()


def on_uncaught_exception(function: Callable[[BaseException], None]) -> None:
    """Call a function, after existing hooks, when an uncaught exception ends the process."""
    previous = sys.excepthook

    def hook(kind: Type[BaseException], error: BaseException, trace: Optional[TracebackType]) -> None:
        if previous is not sys.__excepthook__:
            previous(kind, error, trace)
        function(error)

    sys.excepthook = hook


def end_stalled_process(rank: int, exchange: str, timeout_s: float) -> None:
    """Report the stalled exchange and all threads' stacks, and end the process; the launcher ends others."""
    report(
        rank,
        f"no answer for {timeout_s:g} s in {exchange}: another rank has stopped, or works longer than "
        "`timeout_s` before its next exchange. Ending the job.",
    )
    faulthandler.dump_traceback(sys.__stderr__ or 2)
    os._exit(1)  # an orderly end of MPI would wait for the stalled call
