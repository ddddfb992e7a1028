# SPDX-License-Identifier: Apache-2.0
"""Hooks that survive their own exceptions."""

from __future__ import annotations

from typing import Any, List

import pytest

from nnabla_adaloss.graph.loss import HookGuard, root_cause


class Planned(Exception):
    pass


def test_no_hooks_are_no_hook() -> None:
    assert HookGuard().chain(None, None) is None


def test_hooks_run_in_order() -> None:
    seen: List[Any] = []
    hook = HookGuard().chain(lambda f: seen.append(("a", f)), None, lambda f: seen.append(("b", f)))
    assert hook is not None
    hook(1)
    assert seen == [("a", 1), ("b", 1)]


def test_whoever_cleans_up_is_called_once_right_after_the_exception() -> None:
    seen: List[Any] = []
    guard = HookGuard(lambda: seen.append("cleaned up"))

    def fail(f: Any) -> None:
        seen.append(f)
        raise KeyboardInterrupt

    first, second = guard.chain(fail), guard.chain(seen.append)
    assert first is not None
    assert second is not None
    for hook in (first, second, first):
        hook(1)
    assert seen == [1, "cleaned up"]
    assert isinstance(guard.error, KeyboardInterrupt)


@pytest.mark.parametrize("error", [Planned("in a hook"), KeyboardInterrupt()])
def test_after_the_first_exception_no_hook_runs_and_the_original_comes_out(error: BaseException) -> None:
    guard, seen = HookGuard(), []

    def fail(f: Any) -> None:
        seen.append(f)
        raise error

    first, second = guard.chain(fail, seen.append), guard.chain(seen.append)
    assert first is not None
    assert second is not None

    def call() -> None:
        first(1)
        second(2)
        raise SystemError("nnabla hides the cause")

    with pytest.raises(type(error)) as caught:
        guard.run(call)
    assert caught.value is error
    assert seen == [1]


def test_an_exception_is_raised_even_when_the_call_returns() -> None:
    guard = HookGuard()

    def fail(f: Any) -> None:
        raise Planned

    hook = guard.chain(fail)
    assert hook is not None
    with pytest.raises(Planned):
        guard.run(lambda: hook(1))


def test_what_the_call_itself_raises_comes_out() -> None:
    def call() -> None:
        raise Planned

    with pytest.raises(Planned):
        HookGuard().run(call)


def test_root_cause_looks_behind_system_errors_only() -> None:
    error, outer = Planned(), SystemError()
    outer.__cause__ = SystemError()
    outer.__cause__.__cause__ = error
    assert root_cause(outer) is error
    assert root_cause(error) is error
    error.__cause__ = ValueError()
    assert root_cause(outer) is error
    alone = SystemError()
    assert root_cause(alone) is alone
