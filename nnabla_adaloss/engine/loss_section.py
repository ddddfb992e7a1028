# SPDX-License-Identifier: Apache-2.0
"""Which scale a gradient has when it leaves the functions between the loss and the first layers."""

from __future__ import annotations

import math
from typing import Optional, Tuple

from ..core.loss_section import loss_section_factor
from ..core.power_of_two import clamp_scale, floor_power_of_two
from ..core.statistics import ArrayStatistics
from ..graph.node import NodeStructure
from .choosing import ScaleChooser
from .component_pass import SEARCH_STEP, ComponentPass


class OneScale:
    """The loss gradient carries S0, and so does everything behind it.

    Args:
        start_scale: S0.
    """

    def __init__(self, start_scale: float) -> None:
        self.seed = self.left_with = start_scale
        self.measures = False

    def scale(
        self, chooser: ScaleChooser, node: NodeStructure, scale: float
    ) -> Tuple[float, Optional[float]]:
        """The scale as it is."""
        return scale, None


class FixedScale:
    """The loss gradient carries S0, and is lifted where a small loss weight or a mean shrinks it.

    Args:
        start_scale: S0.
    """

    def __init__(self, start_scale: float) -> None:
        self.seed = self.left_with = start_scale
        self.measures = False

    def scale(
        self, chooser: ScaleChooser, node: NodeStructure, scale: float
    ) -> Tuple[float, Optional[float]]:
        """S0, lifted."""
        return scale * _lift(chooser, node, scale, several=chooser.structure.loss_exits > 1), None


class MeasuredScale:
    """The gradient leaves the section with the scale that its component has room for.

    Args:
        components: scales of the components.
        root: position of the loss.
        start_scale: what the loss gradient starts with while nothing is known.
        u_max: the largest magnitude of a gradient of one element.
    """

    def __init__(self, components: ComponentPass, root: int, start_scale: float, u_max: float) -> None:
        self._components = components
        self._u_max = u_max
        component = components.of[root]
        known, tries = components.scales[component], components.silent[component]
        if known is None and tries:
            components.searched.add(component)
            start_scale = clamp_scale(start_scale * SEARCH_STEP**tries)
        self.seed = start_scale if known is None else known
        self.left_with = self.seed
        self.measures = True
        self._left = False

    def scale(
        self, chooser: ScaleChooser, node: NodeStructure, scale: float
    ) -> Tuple[float, Optional[float]]:
        """The scale of the component behind `node`; less where a single element would overflow with it, which
        the many that it is spread over do not.
        """
        if not node.separates or not node.inputs:
            return scale, None
        components = self._components
        behind = components.of[node.inputs[0]]
        wanted = components.scales[behind]
        output, ranges = node.outputs[0], chooser.ranges
        u_max = self._u_max if ranges is None else ranges.u_max_single(output)
        g = chooser.statistics.gradient(output, scale)
        highest = largest_scale(components, g, output, scale, u_max)
        if wanted is not None and highest == math.inf:
            # Of a scalar that was only seen absent, nobody knows how large it is.
            highest = scale
        if wanted is None:
            lifted = scale * _lift(chooser, node, scale, several=False)
            wanted = lifted
            if components.silent[behind] and highest < math.inf:
                wanted = highest
                if node.expands:
                    components.searched.add(behind)
                    wanted = clamp_scale(highest * SEARCH_STEP ** (components.silent[behind] - 1))
        elif wanted > highest and not node.expands:
            wanted = highest
        components.scales[behind] = wanted
        if node.expands and not self._left:
            self._left, self.left_with = True, wanted
        return (highest, wanted) if wanted > highest else (wanted, None)


def largest_scale(
    components: ComponentPass, g: ArrayStatistics, output: int, scale: float, u_max: float
) -> float:
    """The largest scale with which a gradient of one element stays in range; infinity: any.

    Args:
        components: the scales of components.
        g: what is known of it, with `scale`.
        output: its position.
        scale: what it carries.
        u_max: the largest magnitude that it may have.
    """
    room = components.room[components.of[output]]
    if room is not None:
        # One batch says little: a loss that is absent from it may be large in the next.
        return room
    return scale * floor_power_of_two(clamp_scale(u_max / g.abs_max)) if g.abs_max else math.inf


def _lift(chooser: ScaleChooser, node: NodeStructure, scale: float, *, several: bool) -> float:
    output = node.outputs[0]
    return loss_section_factor(
        # Of what nothing is known, nothing is raised.
        chooser.statistics.gradient(output, chooser.scales[output]).abs_max,
        math.prod(chooser.structure.described.shapes[output]),
        scale,
        chooser.start.start_scale,
        expands=node.expands,
        u_max=chooser.u_max,
        several=several,
    )
