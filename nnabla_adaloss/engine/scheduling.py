# SPDX-License-Identifier: Apache-2.0
"""The next schedule of a graph: what is known goes to `choose`, and what it chose comes back."""

from __future__ import annotations

import math
from typing import Dict, Optional, Tuple

from ..core.config import AdaLossConfig
from ..core.power_of_two import floor_power_of_two
from ..emulation.gradient_ranges import GradientRanges
from .choose import Room, Start, choose
from .component_scales import ComponentScales
from .prepared_graph import PreparedGraph
from .schedule import ScaleSchedule
from .wishes import Wishes


def next_schedule(
    planned: PreparedGraph,
    settings: Tuple[AdaLossConfig, ComponentScales, Wishes],
    base: float,
    iteration: int,
    scale: Optional[float],
    *,
    seeded: bool,
    again: bool,
) -> ScaleSchedule:
    """The next schedule; the one in use, if it would be chosen again. `base` is what the loss gradient starts
    with when nothing is known: S0, where `scale` gives it.
    """
    config, components, wishes = settings
    graph, structure, fixed = planned.components, planned.plan.structure, scale is not None
    ranges = ranges_of(planned, config)
    known = components.room(graph, {} if ranges is None else ranges.of_components(graph))
    choice = choose(
        graph,
        known,
        _start(planned, config, components, known, base, fixed=fixed, seeded=seeded),
        wishes.about(structure, planned.statistics, iteration, ranges, fixed=fixed),
        _weight_room(planned, config, ranges),
        power_of_two=config.power_of_two,
    )
    present = planned.cache.schedule
    held = present is not None and not again and present.fixed_scale == scale
    if held and present is not None and present.applies(structure, choice.scales):
        return present
    return ScaleSchedule(structure, graph, choice.scales, scale, choice.reasons, wishes.unbounded)


def _start(
    planned: PreparedGraph,
    config: AdaLossConfig,
    components: ComponentScales,
    known: Room,
    base: float,
    *,
    fixed: bool,
    seeded: bool,
) -> Start:
    graph = planned.components
    root = graph.names[graph.root]
    single = root in graph.single and not seeded
    if fixed:
        amax = components.amaxes_of(graph)
        return Start(base, base, True, [1.0, *amax[1:]] if single else amax, config.range.u_max)
    if not single:
        return Start(known.of_root(base), base)
    # The loss gradient is 1.
    end = min(floor_power_of_two(components.u_max(root)), components.policy.max_scale)
    return Start(end if any(known.room) else base, base)


def _weight_room(
    planned: PreparedGraph, config: AdaLossConfig, ranges: Optional[GradientRanges]
) -> Dict[int, float]:
    """By position of a weight, the largest alpha with which its scaled copy stays in range: 1 if it was
    not measured.
    """
    largest = config.range.u_max
    found: Dict[int, float] = {}
    if planned.storage is not None:
        # Scaled copies of weights are stored as weights are.
        largest = min(largest, planned.storage.precisions.narrowest.stored_data.max)
    for _, slot in planned.plan.structure.layer_slots.values():
        weight = planned.statistics.data(slot.factor)
        if weight is None and slot.factor in planned.statistics.wanted.data:
            found[slot.factor] = 1.0
        elif weight is not None and weight.abs_max:
            own = largest if ranges is None else ranges.of_weight(slot)
            room = max(floor_power_of_two(own / weight.abs_max), 1.0)
            found[slot.factor] = min(room, found.get(slot.factor, math.inf))
    return found


def ranges_of(planned: PreparedGraph, config: AdaLossConfig) -> Optional[GradientRanges]:
    """The range of each gradient, where layers differ; None: all have that of the configuration."""
    storage = planned.storage
    if storage is None or storage.precisions.only is not None:
        return None
    return GradientRanges(config, storage, planned.plan)
