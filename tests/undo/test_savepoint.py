# SPDX-License-Identifier: Apache-2.0
"""Attributes that are brought back."""

from __future__ import annotations

from nnabla_adaloss.undo import Savepoint


class Count:
    undone = "value", "parts"

    def __init__(self) -> None:
        self.value, self.parts, self.kept = 1, {"a": 1}, 1


def test_what_is_undone_is_brought_back_each_time_and_nothing_else() -> None:
    one, other = Count(), Count()
    other.value = 5
    before = Savepoint([one, other])
    for _ in range(2):
        one.value, one.parts, one.kept, other.value = 2, {"b": 2}, 2, 6
        before.restore()
        assert (one.value, one.parts, one.kept, other.value) == (1, {"a": 1}, 2, 5)
