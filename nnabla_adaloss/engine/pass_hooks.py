# SPDX-License-Identifier: Apache-2.0
"""The hooks of one backward pass: when its steps run, and what becomes of exceptions in them.

nnabla does not stop backward when a Python hook raises: the remaining functions run, and the caller gets a
SystemError that hides the cause. The first exception is kept here, every array is put back at once, and later
hooks do nothing.
"""

from __future__ import annotations

from typing import Any, Callable, List, Mapping, Optional, Protocol, Sequence, Tuple

from ..graph.hooks import Hook
from ..graph.node import Node
from .held_scales import Brought


class Restored(Protocol):
    """A pass that swaps arrays."""

    def restore(self) -> None:
        """Put every swapped array back; harmless when none is swapped."""


class HookedPass(Restored, Protocol):
    """A pass that does something around each function.

    Attributes:
        unfinished: the function that runs or ran last, if there is still something to do after it.
    """

    unfinished: List[Node]

    def passes_on(self) -> Callable[[Any], bool]:
        """What tells whether nothing is left to be done around a function."""

    def prepare(self, f: Any) -> None:
        """Do what is to be done before the function `f` runs."""

    def finish_last(self) -> None:
        """Do what is to be done after the function that ran last, if that is still to be done."""


class BringingPass(Restored, Protocol):
    """A pass that multiplies some gradients between two functions."""

    def bring(self, brought: Sequence[Brought]) -> None:
        """Multiply gradients."""


class HookAfter:
    """Multiplies gradients after single functions, until that raises.

    Args:
        running: the pass.
        between: which gradients, by the key of the function after which.

    Attributes:
        error: the exception that was raised.
    """

    def __init__(self, running: BringingPass, between: Mapping[int, Sequence[Brought]]) -> None:
        self.error: Optional[BaseException] = None
        self._pass, self._brought = running, between.get

    def __call__(self, f: Any) -> None:
        """Multiply what is to be multiplied after this function; mostly nothing."""
        brought = self._brought(hash(f))
        if brought is not None and self.error is None:
            try:
                self._pass.bring(brought)
            except BaseException as error:
                self.error = error
                self._pass.restore()


class PassHooks:
    """Runs the steps of a pass before and after each function's backward, and the user's own hooks after
    them.

    Args:
        running: the pass.
        user_pre: the user's own pre hook.
        user_post: the user's own post hook.

    Attributes:
        error: the first exception that a step or a hook raised.
    """

    def __init__(
        self, running: HookedPass, user_pre: Optional[Hook] = None, user_post: Optional[Hook] = None
    ) -> None:
        self.error: Optional[BaseException] = None
        self._pass = running
        self._user_pre = user_pre
        self._user_post = user_post

    def pair(self, *, looked_at: bool) -> Tuple[Hook, Optional[Hook]]:
        """What runs before and after each function's backward.

        Every call of a hook costs, also of one that does nothing. Where nobody looks at gradients between two
        functions, what is to be done after one is done before the next, and `BackwardPass.finish_last` does
        the rest.

        Args:
            looked_at: somebody looks at gradients after each function: a communicator, or a monitor.
        """
        if looked_at or self._user_post is not None:
            return self._before, self._after
        if self._user_pre is not None:
            return self._between, None
        return self._fast_path(), None

    def _fast_path(self) -> Hook:
        """As `_between`, with little to be done for most functions."""
        unfinished, passed_on = self._pass.unfinished, self._pass.passes_on()
        finish_last, prepare = self._pass.finish_last, self._pass.prepare

        def between(f: Any) -> None:
            if self.error is None:
                try:
                    if unfinished:
                        finish_last()
                    if not passed_on(f):
                        prepare(f)
                except BaseException as error:
                    self._fail(error)

        return between

    def _between(self, f: Any) -> None:
        self._finish_last()
        self._before(f)

    def _before(self, f: Any) -> None:
        if self.error is not None:
            return
        try:
            self._pass.prepare(f)
            if self._user_pre is not None:
                self._user_pre(f)
        except BaseException as error:
            self._fail(error)

    def _after(self, f: Any) -> None:
        self._finish_last()
        if self.error is None and self._user_post is not None:
            try:
                self._user_post(f)
            except BaseException as error:
                self._fail(error)

    def _finish_last(self) -> None:
        if self.error is None:
            try:
                self._pass.finish_last()
            except BaseException as error:
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.error = error
        self._pass.restore()
