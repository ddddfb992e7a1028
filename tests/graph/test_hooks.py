# SPDX-License-Identifier: Apache-2.0
"""Hooks that raise."""

from __future__ import annotations

from typing import Any, List

import pytest

from nnabla_adaloss.graph.hooks import HookGuard, root_cause


class Planned(Exception):
    pass


@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize("error", [Planned("in a hook"), KeyboardInterrupt()])
def test_the_first_exception_stops_all_hooks_and_comes_out(error: BaseException, returns: bool) -> None:
    seen: List[Any] = []
    guard = HookGuard(lambda: seen.append("cleaned up"))

    def fail(f: Any) -> None:
        seen.append(f)
        raise error

    first, second = guard.chain(fail, seen.append), guard.chain(None, seen.append)
    assert guard.chain(None, None) is None
    assert first is not None
    assert second is not None

    def call() -> None:
        for hook in (first, second, first):
            hook(1)
        if not returns:
            raise SystemError("nnabla hides the cause")

    with pytest.raises(type(error)) as caught:
        guard.run(call)
    assert caught.value is guard.error is error
    assert seen == [1, "cleaned up"]


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
