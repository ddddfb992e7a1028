# SPDX-License-Identifier: Apache-2.0
"""Which scales a pass gets: those of the schedule in use, if they would be chosen again, or new ones."""

from __future__ import annotations

import math
from typing import Mapping, NamedTuple, Optional

from ..core.ada_loss import AdaLoss
from ..core.config import AdaLossConfig
from ..core.layer_scale import Constraints
from ..core.methods import Needs
from ..emulation.gradient_ranges import GradientRanges
from ..emulation.rounded_storage import RoundedStorage
from ..graph.components import Components
from ..graph.plan import GraphPlan
from .choosing import LayerAlphas, LossSection, PassStart, ScaleChoice, ScaleChooser, choose
from .component_pass import ComponentPass
from .layer_alphas import AlphasByComponent, AlphasByMethod, AlphasOfOne
from .loss_section import FixedScale, MeasuredScale, OneScale, largest_scale
from .prepared_graph import PreparedGraph
from .schedule import ScaleSchedule
from .statistics import Statistics


class Scheduler:
    """Chooses the scales of one engine's passes: before a pass, or with the pass as it runs.

    Args:
        config: how scales are computed.
        ada_loss: decides about layers, and remembers.
        storage: an emulated storage, or None.

    Attributes:
        by_layer: whether layers separate components.
    """

    def __init__(self, config: AdaLossConfig, ada_loss: AdaLoss, storage: Optional[RoundedStorage]) -> None:
        self._config, self._ada_loss, self._storage = config, ada_loss, storage
        self._u_max, self.by_layer = config.range.u_max, config.method.needs is Needs.COMPONENTS

    @property
    def u_max_single(self) -> float:
        """The largest magnitude of a gradient of one element; such are never stored in 8 bits."""
        storage = self._storage
        if storage is None:
            return self._u_max
        return max(self._u_max, storage.precisions.narrowest.gradient_format(1).max)

    def limits(self, plan: GraphPlan, components: Components) -> Mapping[str, float]:
        """The largest magnitude of each component, by name, where layers are not stored alike."""
        ranges = self._ranges(plan)
        return {} if ranges is None else ranges.of_components(components)

    def schedule(
        self, planned: PreparedGraph, start: PassStart, components: Optional[ComponentPass]
    ) -> Optional[ScaleSchedule]:
        """A schedule chosen from what is known before the pass, or the present one, if it would be chosen
        again; None: not everything is known.

        Args:
            planned: the graph.
            start: where the pass starts.
            components: the scales of components; None: they are not measured.
        """
        known, present = planned.statistics.known(), planned.cache.schedule
        if known is None:
            return None
        structure, ranges = planned.plan.structure, self._ranges(planned.plan)
        if self.by_layer and components and present and present.is_for(structure, start.fixed_scale):
            limits = Limits(self._constraints(start), self.u_max_single, ranges)
            # To choose takes as long as the backward of many layers, and mostly changes nothing.
            if would_be_chosen(present, components, known, limits) and known.complete:
                return present
        choice = self._choice(planned, start, components, looks=self._ada_loss.reports)
        chooser = choose(structure, choice, known, start, self._u_max, ranges)
        if not known.complete:
            return None
        planned.statistics.keep(*known.asked, known.looked_at)
        self._ada_loss.take_over_all(chooser.decided)
        return chooser.schedule()

    def chooser(
        self, planned: PreparedGraph, start: PassStart, components: Optional[ComponentPass]
    ) -> ScaleChooser:
        """Chooses scales while a pass runs.

        Args:
            planned: the graph.
            start: where the pass starts.
            components: what is measured of components; None: nothing.
        """
        return self._chooser(planned, start, self._choice(planned, start, components))

    def one_scale(self, planned: PreparedGraph, start: PassStart) -> ScaleChooser:
        """Chooses one scale for all layers, and learns nothing."""
        return self._chooser(planned, start, ScaleChoice(OneScale(start.start_scale), AlphasOfOne()))

    def _chooser(self, planned: PreparedGraph, start: PassStart, choice: ScaleChoice) -> ScaleChooser:
        plan, statistics = planned.plan, planned.statistics
        return ScaleChooser(plan.structure, choice, statistics, start, self._u_max, self._ranges(plan))

    def _choice(
        self,
        planned: PreparedGraph,
        start: PassStart,
        components: Optional[ComponentPass],
        *,
        looks: bool = True,
    ) -> ScaleChoice:
        measured, constraints = start.fixed_scale is None, self._constraints(start)
        section: LossSection = FixedScale(start.start_scale)
        alphas: LayerAlphas = AlphasByMethod(self._ada_loss, constraints)
        if self.by_layer and components is not None:
            alphas = AlphasByComponent(components, constraints, looks=looks)
        if measured and components is not None:
            root = planned.plan.structure.roots[0]
            section = MeasuredScale(components, root, start.start_scale, self.u_max_single)
        return ScaleChoice(section, alphas, components)

    def _constraints(self, start: PassStart) -> Constraints:
        # Scaled copies of weights are stored as weights are.
        stored = math.inf if self._storage is None else self._storage.precisions.narrowest.stored_data.max
        guard_from = 1.0 if start.fixed_scale is None else 0.0
        return Constraints(weight_max=min(self._u_max, stored), guard_from=guard_from)

    def _ranges(self, plan: GraphPlan) -> Optional[GradientRanges]:
        """The range of each gradient, where layers differ; None: all have that of the configuration."""
        storage = self._storage
        if storage is None or storage.precisions.only is not None:
            return None
        return GradientRanges(self._config, storage, plan)


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
