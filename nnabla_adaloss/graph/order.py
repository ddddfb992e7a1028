# SPDX-License-Identifier: Apache-2.0
"""The functions of a graph, in the order in which forward visits them."""

from __future__ import annotations

from typing import Any, List

import nnabla as nn


def forward_order(loss: nn.Variable) -> List[Any]:
    """The functions behind `loss`, in the order in which forward visits them."""
    order: List[Any] = []
    loss.visit(order.append)
    return order
