# SPDX-License-Identifier: Apache-2.0
"""Hooks around functions, and the exceptions that they raise."""

from __future__ import annotations

from typing import Any, Callable, Optional

Hook = Callable[[Any], None]
"""Function that nnabla calls with each of its functions, before or after it."""


class HookGuard:
    """Runs hooks until one raises, keeps its `error`, and calls `on_error` at once: nnabla would go on."""

    def __init__(self, on_error: Callable[[], None] = lambda: None) -> None:
        self.error: Optional[BaseException] = None
        self._on_error = on_error

    def chain(self, *hooks: Optional[Hook]) -> Optional[Hook]:
        """Combine `hooks` into one that calls them in order; None for none."""
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
                self._on_error()

        return guarded

    def run(self, call: Callable[[], None]) -> None:
        """Run `call` and raise the original exception of a hook."""
        try:
            call()
        except BaseException as error:
            raise (self.error or root_cause(error)) from None
        if self.error is not None:
            raise self.error


def root_cause(error: BaseException) -> BaseException:
    """Cause of a SystemError raised by nnabla, such as a signal that arrived in a hook."""
    while isinstance(error, SystemError) and error.__cause__ is not None:
        error = error.__cause__
    return error
