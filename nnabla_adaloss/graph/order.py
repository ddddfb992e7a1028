# SPDX-License-Identifier: Apache-2.0
"""The functions of a graph, in the orders in which forward and backward visit them."""

from __future__ import annotations

import heapq
from typing import Any, List, Set, Tuple

import nnabla as nn


def forward_order(loss: nn.Variable) -> List[Any]:
    """The functions behind `loss`, in the order in which forward visits them."""
    order: List[Any] = []
    loss.visit(order.append)
    return order


def backward_order(loss: nn.Variable) -> List[Any]:
    """The functions that backward from `loss` visits, in the order in which it visits them."""
    order: List[Any] = []
    seen: Set[int] = set()
    waiting: List[Tuple[int, int, Any]] = []

    def push(f: Any) -> None:
        if f is not None and f.need_grad and hash(f) not in seen:
            seen.add(hash(f))
            heapq.heappush(waiting, (-f.rank, len(seen), f))

    push(loss.parent)
    while waiting:
        f = heapq.heappop(waiting)[2]
        order.append(f)
        for v in f.inputs:
            if v.need_grad:
                push(v.parent)
    return order
