# SPDX-License-Identifier: Apache-2.0
"""What a pass has seen of components: how large their gradients are, and which of them overflowed first."""

from __future__ import annotations

import math
from typing import Dict, Optional, Sequence, Set, Tuple

from ..graph.components import separates
from ..graph.plan import GraphPlan
from .component_scales import ComponentPass
from .leaf_gradients import Written
from .running_pass import RunningPass
from .statistics_source import Findings

Unscaled = Tuple[Written, float]
"""The gradient of a leaf, and its largest magnitude, divided by its scale; infinity: it was not finite."""


def measure_components(
    running: RunningPass, components: ComponentPass, findings: Findings, unscaled: Sequence[Unscaled]
) -> Set[int]:
    """Have components take note of what a pass has seen.

    Args:
        running: the pass, at its end.
        components: the components.
        findings: the gradients that were looked at.
        unscaled: those of leaves.

    Returns:
        Keys of the variables whose gradients were not finite, but for leaves.
    """
    bad = set(findings.nonfinite)
    # An emulated storage has seen every gradient, as it was stored last, but the one that backward began
    # with.
    for key, scale in running.scales.items():
        seen = None if running.storage is None else running.storage.gradient_statistics(key)
        if seen is not None:
            components.measure_gradient(key, seen.abs_max, scale)
            # Gradients of leaves were looked at when they were unscaled.
            if seen.nonfinite and key not in running.plan.leaves:
                bad.add(key)
        elif key in findings.amax:
            components.measure_gradient(key, findings.amax[key] * scale, scale)
    for entry, largest in unscaled:
        if entry.alone and largest < math.inf:
            component = _component_of(running.plan, components, entry)
            components.measure(component, largest * entry.scale, entry.scale)
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
        bad: keys of the variables whose gradients were not finite, but for leaves.
        unscaled: the gradients of leaves.
        raised: those of `bad` that were finite as they arrived: they were brought too far to the scale of the
            component behind them.
    """
    bad_leaves: Dict[int, int] = {}
    for entry, largest in unscaled:
        if largest == math.inf:
            bad_leaves.setdefault(entry.function, _component_of(plan, components, entry))
    if not bad and not bad_leaves:
        return None
    for node in plan.nodes.values():
        if not bad.isdisjoint(node.output_keys):
            if node.single in raised and separates(node) and node.input_keys:
                return components.of[node.input_keys[0]]
            return components.producers[node.function_key]
        if node.function_key in bad_leaves:
            return bad_leaves[node.function_key]
    return None


def _component_of(plan: GraphPlan, components: ComponentPass, entry: Written) -> int:
    if entry.key in components.of and any(
        s.target_key == entry.key for s in plan.nodes[entry.function].scalings
    ):
        return components.of[entry.key]
    return components.producers[entry.function]
