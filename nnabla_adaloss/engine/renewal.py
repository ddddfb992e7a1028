# SPDX-License-Identifier: Apache-2.0
"""Whether the schedule in use does as well as one that would be chosen now.

To choose scales anew takes as long as the backward of many layers, and mostly comes to nearly the same ones.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

from ..core.layer_scale import Constraints
from ..core.scale_history import serves
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


def still_serves(
    schedule: ScaleSchedule, components: ComponentPass, statistics: Statistics, limits: Limits
) -> bool:
    """Whether no scale of a schedule is too large by now, or much smaller than it could be.

    Args:
        schedule: the schedule, of the present graph.
        components: the scales that components would get now.
        statistics: those of earlier iterations.
        limits: what scales respect.
    """
    wanted, ranges = list(components.scales), limits.ranges
    for node in schedule.structure.handovers:
        output, behind = node.outputs[0], components.of[node.inputs[0]]
        scale, own = schedule.scales.get(output), wanted[behind]
        if scale is None or own is None:
            continue
        u_max = limits.u_max_single if ranges is None else ranges.u_max_single(output)
        highest = largest_scale(components, statistics.gradient(output, scale), output, scale, u_max)
        if not serves(scale, min(own, highest)):
            return False
        # What is behind a single element has no more room than that.
        if not node.expands:
            wanted[behind] = min(own, highest)
    return all(map(_serves, schedule.components or (), wanted)) and _weights_fit(schedule, statistics, limits)


def _serves(scale: Optional[float], wanted: Optional[float]) -> bool:
    return wanted is None or (scale is not None and serves(scale, wanted))


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
