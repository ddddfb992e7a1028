# SPDX-License-Identifier: Apache-2.0
"""What becomes of exceptions in the hooks of a pass."""

from __future__ import annotations

from typing import List, Sequence

import nnabla as nn
import nnabla.functions as F
import pytest

from nnabla_adaloss.engine.held_scales import Brought
from nnabla_adaloss.engine.pass_hooks import HookAfter


class Failing:
    """A pass whose gradients cannot be multiplied."""

    def __init__(self) -> None:
        self.calls: List[str] = []

    def bring(self, brought: Sequence[Brought]) -> None:
        self.calls.append(f"bring {brought[0].position}")
        raise KeyboardInterrupt

    def restore(self) -> None:
        self.calls.append("restore")


def test_after_an_exception_arrays_are_put_back_and_nothing_more_is_done() -> None:
    h = F.tanh(nn.Variable((2,)))
    first, second = F.tanh(h).parent, h.parent
    running = Failing()
    hook = HookAfter(running, {hash(first): [Brought(1, 2.0)], hash(second): [Brought(2, 2.0)]})
    for f in (F.sin(h).parent, first, second):
        hook(f)
    assert running.calls == ["bring 1", "restore"]
    with pytest.raises(KeyboardInterrupt):
        raise hook.error or AssertionError
