# SPDX-License-Identifier: Apache-2.0
"""Hooks that survive their own exceptions.

nnabla does not stop backward when a Python hook raises: the remaining functions run, and the caller gets
a SystemError that hides the cause. A guard keeps the first exception, makes every later hook return at
once, and hands the original back after backward has returned.
"""

from __future__ import annotations

from typing import Any, Callable, Optional

Hook = Callable[[Any], None]


class HookGuard:
    """Runs hooks until one raises, keeps its exception as `error`, and calls `on_error` at once."""

    def __init__(self, on_error: Optional[Callable[[], None]] = None) -> None:
        self.error: Optional[BaseException] = None
        self._on_error = on_error

    def chain(self, *hooks: Optional[Hook]) -> Optional[Hook]:
        """One hook that calls `hooks` in order; None when there is none."""
        present = [hook for hook in hooks if hook is not None]
        if not present:
            return None

        def guarded(f: Any) -> None:
            if self.error is not None:
                return
            try:
                for hook in present:
                    hook(f)
            except BaseException as error:
                self.error = error
                if self._on_error is not None:
                    self._on_error()

        return guarded

    def run(self, call: Callable[[], None]) -> None:
        """Call `call` and raise what a hook raised, as it was."""
        try:
            call()
        except BaseException as error:
            raise (self.error or root_cause(error)) from None
        if self.error is not None:
            raise self.error


def root_cause(error: BaseException) -> BaseException:
    """What a SystemError raised by nnabla hides: a signal may arrive between two of our lines."""
    while isinstance(error, SystemError) and error.__cause__ is not None:
        error = error.__cause__
    return error
