# SPDX-License-Identifier: Apache-2.0
"""What made a gradient overflow: which component's scale, or which layer's own."""

from __future__ import annotations

from typing import AbstractSet, Dict, Iterable, List, Mapping, Optional, Set, Tuple

from ..graph.components import Components
from ..graph.node import Node
from ..graph.plan import GraphPlan
from .component_pass import ComponentPass


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
    bad: AbstractSet[int],
    bad_leaves: Iterable[Tuple[int, int]],
    *,
    raised: AbstractSet[int] = frozenset(),
) -> Optional[int]:
    """The first component, in backward order, that was not finite; None: all were.

    Args:
        plan: the graph.
        components: its components.
        bad: positions of the variables whose gradients were not finite, except leaves.
        bad_leaves: positions of the leaves whose gradients were not, each with a function that wrote it.
        raised: those of `bad` that were finite as they arrived: they were brought too far to the scale of the
            component behind them.
    """
    structure = plan.structure
    functions: Dict[int, int] = {}
    for leaf, function in bad_leaves:
        functions.setdefault(function, components.of_leaf(structure, leaf, function))
    if not bad and not functions:
        return None
    for node in structure.nodes:
        if not bad.isdisjoint(node.outputs):
            if node.single in raised and node.separates and node.inputs:
                return components.of[node.inputs[0]]
            return components.producers[node.number]
        if node.number in functions:
            return functions[node.number]
    return None


def unseen_before(components: Components, overflowed: int, seen: AbstractSet[int]) -> Set[int]:
    """The components that may have handed an overflow on: those before it of which nothing was seen.

    Args:
        components: the components.
        overflowed: the first of which something was not finite.
        seen: those of which something was, and was finite. Scalars do not overflow before what follows them.
    """
    names, single = components.names, components.single
    found: Set[int] = set()
    waiting = [overflowed]
    while waiting:
        behind = waiting.pop()
        before = {index for index, following in enumerate(components.next) if behind in following}
        new = {index for index in before - seen - found - {overflowed} if names[index] not in single}
        found |= new
        waiting += new
    return found
