# SPDX-License-Identifier: Apache-2.0
"""The window of batches whose gradients are summed for one update."""

from __future__ import annotations

from typing import Any, Callable


def accumulate(
    solver: Any, data_feeder: Callable[[], Any], batches: int, forward_backward: Callable[[], Any]
) -> None:
    """Zero the gradients, then feed, run forward and backward `batches` times.

    Args:
        solver: holds the gradients.
        data_feeder: fills the input variables.
        batches: how many batches make one update.
        forward_backward: runs forward and backward on what was fed, and adds its gradients.
    """
    solver.zero_grad()
    for _ in range(batches):
        data_feeder()
        forward_backward()
