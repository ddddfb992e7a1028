# SPDX-License-Identifier: Apache-2.0
"""Which layer's own scale made a gradient overflow."""

from __future__ import annotations

from typing import Dict, List, Mapping, Optional, Set

from ..graph.node import Node
from ..graph.plan import GraphPlan


def layer_to_blame(plan: GraphPlan, label: str, scales: Mapping[str, float]) -> Optional[str]:
    """The nearest layer towards the loss that raised the gradient of the function `label`.

    Args:
        plan: the graph.
        label: name of the first function whose gradients were not finite.
        scales: the scale of each layer, by name.

    Returns:
        A layer whose scale is above 1, or None: then the global scale is too large.
    """
    consumers: Dict[int, List[Node]] = {}
    for node in plan.nodes.values():
        for key in {*node.input_keys, *(s.target_key for s in node.scalings)}:
            consumers.setdefault(key, []).append(node)
    waiting = [key for node in plan.nodes.values() if node.label == label for key in node.output_keys]
    seen: Set[int] = set()
    while waiting:
        key = waiting.pop(0)
        if key in seen:
            continue
        seen.add(key)
        for node in consumers.get(key, []):
            for scaling in node.scalings:
                if scaling.target_key == key and scales.get(scaling.layer, 1.0) > 1.0:
                    return scaling.layer
            waiting += node.output_keys
    return None
