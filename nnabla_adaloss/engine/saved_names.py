# SPDX-License-Identifier: Apache-2.0
"""Which network a saved state is of."""

from __future__ import annotations

from itertools import zip_longest
from typing import List, Sequence

from ..graph.plan import GraphPlan


def fingerprint(plan: GraphPlan) -> List[str]:
    """Type, name, and shapes of the parameters of each function, in backward order.

    Batches of other sizes make no other network, nor do sentences of other lengths.
    """
    return [
        " ".join([node.type_name, node.label, *(_by(leaf.shape) for leaf in node.leaves)])
        for node in plan.nodes.values()
    ]


def check_network(plan: GraphPlan, network: Sequence[str]) -> None:
    """Raise ValueError unless `network` is the fingerprint of this one."""
    ours = fingerprint(plan)
    if list(network) != ours:
        theirs, mine = next((a, b) for a, b in zip_longest(network, ours) if a != b)
        raise ValueError(f"state is of another network: it has {theirs} where this one has {mine}")


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
