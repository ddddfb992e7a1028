# SPDX-License-Identifier: Apache-2.0
"""Tells monitors that an update is over."""

from __future__ import annotations

import nnabla as nn

from ..monitor import Audience, UpdateEnded
from .result import UpdateResult


def tell_of_update(audience: Audience, iteration: int, result: UpdateResult, loss: nn.Variable) -> None:
    """Tell who wants to know; only then is the loss read, which on a GPU waits for it.

    Args:
        audience: the monitors.
        iteration: number of the iteration.
        result: what became of it.
        loss: shape of one element; that of the last batch.
    """
    if audience.wants(UpdateEnded, iteration):
        told = (result.updated, result.reason, result.scale, result.retries, float(loss.d.flat[0]))
        audience.tell(UpdateEnded(iteration, *told))
