# SPDX-License-Identifier: Apache-2.0
"""What made a gradient overflow: which component's scale, or which layer's own."""

from __future__ import annotations

import math
from typing import Dict, List, Mapping, Optional, Sequence, Set, Tuple

from ..graph.node import Node
from ..graph.plan import GraphPlan
from .component_scales import ComponentPass
from .leaf_gradients import Written

Unscaled = Tuple[Written, float]
"""The gradient of a leaf, and its largest magnitude, divided by its scale; infinity: it was not finite."""


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


def first_overflow(
    plan: GraphPlan,
    components: ComponentPass,
    bad: Set[int],
    unscaled: Sequence[Unscaled],
    *,
    raised: Set[int],
) -> Optional[int]:
    """The first component, in backward order, that was not finite; None: all were.

    Args:
        plan: the graph.
        components: its components.
        bad: positions of the variables whose gradients were not finite, except leaves.
        unscaled: the gradients of leaves.
        raised: those of `bad` that were finite as they arrived: they were brought too far to the scale of the
            component behind them.
    """
    structure = plan.structure
    bad_leaves: Dict[int, int] = {}
    for entry, largest in unscaled:
        if largest == math.inf:
            component = components.of_leaf(structure, entry.leaf, entry.function)
            bad_leaves.setdefault(entry.function, component)
    if not bad and not bad_leaves:
        return None
    for node in structure.nodes:
        if not bad.isdisjoint(node.outputs):
            if node.single in raised and node.separates and node.inputs:
                return components.of[node.inputs[0]]
            return components.producers[node.number]
        if node.number in bad_leaves:
            return bad_leaves[node.number]
    return None
