# SPDX-License-Identifier: Apache-2.0
"""A training that is watched, and recordings made up."""

from __future__ import annotations

from typing import Any

from nnabla_adaloss import LayerRow, Overflowed, Recording, ScaleChanged, UpdateEnded


def layer(iteration: int, name: str, underflowed: Any = 0, attempt: int = 0, **fields: Any) -> LayerRow:
    known = {"elements": 100, "zeros": underflowed, "underflowed": underflowed, "overflowed": 1, **fields}
    return LayerRow(iteration, attempt, name, 2.0, 8.0 * iteration, "method", **known)


def whole() -> Recording:
    """A recording of three iterations."""
    return Recording(
        [
            layer(1, "conv/conv", headroom=3.0, exponents=[-4, 10, 0, 30]),
            ScaleChanged(1, 8.0, 1024.0),
            UpdateEnded(1, True, "updated", 1024.0, 1, 0.5),
            Overflowed(2, 0, "overflow", ("conv/conv",), "conv/conv", 1024.0),
            ScaleChanged(2, 1024.0, 512.0),
            layer(3, "conv/conv", 5, exponents=[]),
            UpdateEnded(3, True, "updated", 512.0, 0, 0.25),
        ]
    )
