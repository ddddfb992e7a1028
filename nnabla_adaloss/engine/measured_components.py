# SPDX-License-Identifier: Apache-2.0
"""What a pass that chooses its scales has seen of components: how large their gradients are, and which of
them overflowed first.
"""

from __future__ import annotations

import math
from typing import Dict, Mapping, Optional, Sequence, Set, Tuple

from ..emulation.rounded_storage import RoundedStorage
from ..graph.plan import GraphPlan
from .component_scales import ComponentPass
from .leaf_gradients import Written
from .shares import component_of_leaf
from .statistics import Findings

Unscaled = Tuple[Written, float]
"""The gradient of a leaf, and its largest magnitude, divided by its scale; infinity: it was not finite."""


def measure_components(
    plan: GraphPlan,
    components: ComponentPass,
    scales: Mapping[int, float],
    findings: Findings,
    unscaled: Sequence[Unscaled],
    storage: Optional[RoundedStorage],
) -> Set[int]:
    """Have components take note of what a pass has measured.

    Args:
        plan: the graph.
        components: its components.
        scales: what each gradient carries in the end, by position.
        findings: the gradients that were measured.
        unscaled: those of leaves.
        storage: an emulated storage, which has seen every gradient as it was stored last, except the one that
            backward began with; or None.

    Returns:
        Positions of the variables whose gradients were not finite, except leaves.
    """
    structure, bad = plan.structure, set(findings.nonfinite)
    leaves = set(structure.leaves)
    gradients = []
    for position, scale in scales.items():
        seen = None if storage is None else storage.gradient_statistics(plan.keys[position])
        if seen is not None:
            gradients.append((position, seen.abs_max, scale))
            # Gradients of leaves are checked where they are unscaled.
            if seen.nonfinite and position not in leaves:
                bad.add(position)
        elif position in findings.amax:
            gradients.append((position, findings.amax[position] * scale, scale))
    components.measure_gradients(gradients)
    components.measure(
        (
            component_of_leaf(structure, components.graph, entry.leaf, entry.function),
            largest * entry.scale,
            entry.scale,
        )
        for entry, largest in unscaled
        if entry.alone and largest < math.inf
    )
    return bad


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
            component = component_of_leaf(structure, components.graph, entry.leaf, entry.function)
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
