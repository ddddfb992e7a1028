# SPDX-License-Identifier: Apache-2.0
"""What reading and planning a graph costs is measured on networks that are planned as in a training."""

from __future__ import annotations

import planning


def test_every_column_is_measured() -> None:
    found = planning.measure(layers=3, rounds=2)
    assert set(found) == {"plan", "floor", "read", "in half", "read and bind", "of another shape"}
    assert all(microseconds > 0.0 for microseconds in found.values())
