# SPDX-License-Identifier: Apache-2.0
"""Whether scales that are due to be chosen would come to those in use.

To choose takes as long as the backward of many layers, and mostly changes nothing.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

from ..core.layer_scale import Constraints
from .component_scales import ComponentPass
from .gradient_ranges import GradientRanges
from .loss_section import largest_scale
from .schedule import ScaleSchedule
from .statistics import Statistics


class Limits(NamedTuple):
    """What scales respect.

    Attributes:
        constraints: of layers; `weight_max` is looked at.
        u_max_single: the largest magnitude of a gradient of one element.
        ranges: the range of each gradient, where layers differ; None: they do not.
    """

    constraints: Constraints
    u_max_single: float
    ranges: Optional[GradientRanges]


def would_be_chosen(
    schedule: ScaleSchedule, components: ComponentPass, statistics: Statistics, limits: Limits
) -> bool:
    """Whether `choose` would come to a schedule again; False also where that is not seen at a glance.

    Args:
        schedule: the schedule, of this graph, with scales by component.
        components: the scales that components get now.
        statistics: those of earlier iterations.
        limits: what scales respect.
    """
    wanted, ranges = list(components.scales), limits.ranges
    # Where only zeros have arrived, a larger scale is looked for; where scales meet, all is looked at.
    if None in wanted or schedule.matched or schedule.fixed_scale is not None:
        return False
    for node in schedule.structure.handovers:
        output, behind = node.outputs[0], components.of[node.inputs[0]]
        scale, own = schedule.scales.get(output), wanted[behind]
        if scale is None or own is None:
            continue
        u_max = limits.u_max_single if ranges is None else ranges.u_max_single(output)
        highest = largest_scale(components, statistics.gradient(output, scale), output, scale, u_max)
        if scale != min(own, highest):
            return False
        # What is behind a single element has no more room than that.
        if not node.expands:
            wanted[behind] = scale
    return wanted == schedule.components and _weights_fit(schedule, statistics, limits)


def _weights_fit(schedule: ScaleSchedule, statistics: Statistics, limits: Limits) -> bool:
    """Whether the scaled copies of weights stay in range."""
    constraints, ranges = limits.constraints, limits.ranges
    for node, slot, alpha in schedule.raised:
        weight = statistics.stored_data(slot.factor)
        if weight is None and node.half:
            weight = statistics.data(slot.factor)
        own = constraints if ranges is None else ranges.of_layer(constraints, slot)
        if weight is not None and alpha * weight.abs_max > own.weight_max:
            return False
    return True
