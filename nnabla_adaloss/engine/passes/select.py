# SPDX-License-Identifier: Apache-2.0
"""Which backward pass runs: without hooks where the schedule allows it, and with hooks for the rest."""

from __future__ import annotations

import math
from typing import Mapping, NamedTuple, Optional, Union

from ...core.ada_loss import AdaLoss
from ...core.config import AdaLossConfig
from ...core.layer_scale import Constraints
from ...core.methods import Needs
from ...emulation.rounded_storage import RoundedStorage
from ...graph.components import Components
from ...graph.plan import GraphPlan, LeafArrays
from ...kernels import Kernels
from ..choosing import LayerAlphas, LossSection, PassStart, ScaleChoice, ScaleChooser, choose
from ..component_scales import ComponentPass
from ..gradient_ranges import GradientRanges
from ..layer_alphas import AlphasByComponent, AlphasByMethod, AlphasOfOne
from ..layer_watch import LayerWatch
from ..loss_section import FixedScale, MeasuredScale, OneScale
from ..prepared_graph import PreparedGraph
from ..renewal import Limits, would_be_chosen
from ..schedule import ScaleSchedule
from .hooked import NO_HOOKS, ChosenSteps, HookedPass, ScheduledSteps, UserHooks
from .hookless import HooklessPass
from .hookless_steps import FallbackReason, HooklessSteps, plan_steps
from .result import PassContext

# Where host and network share the memory: a network whose scaled weights are larger has layers that take long
# beside what is done around them.
_MAX_BYTES = 2**23


class PassRequest(NamedTuple):
    """What is asked of a pass, besides its scales.

    Attributes:
        clear_buffer: free what backward no longer needs.
        hooks: the user's own.
        watch: who is told of layers; None: nobody.
    """

    clear_buffer: bool
    hooks: UserHooks = NO_HOOKS
    watch: Optional[LayerWatch] = None


class Passes:
    """Makes the backward passes of one engine.

    Args:
        config: how scales are computed.
        ada_loss: decides about layers, and remembers.
        kernels: passes over memory.
        storage: an emulated storage, or None.
    """

    def __init__(
        self,
        config: AdaLossConfig,
        ada_loss: AdaLoss,
        kernels: Kernels,
        storage: Optional[RoundedStorage],
    ) -> None:
        self._config, self._ada_loss, self._kernels, self._storage = config, ada_loss, kernels, storage
        self._u_max, self._by_layer = config.range.u_max, config.method.needs is Needs.COMPONENTS
        self._max_bytes = config.planned_bytes
        if self._max_bytes is None and not kernels.asynchronous:
            self._max_bytes = _MAX_BYTES

    @property
    def u_max_single(self) -> float:
        """The largest magnitude of a gradient of one element; such are never stored in 8 bits."""
        storage = self._storage
        if storage is None:
            return self._u_max
        return max(self._u_max, storage.precisions.narrowest.gradient_format(1).max)

    def limits(self, planned: PreparedGraph, components: Components) -> Mapping[str, float]:
        """The largest magnitude of each component, by name, where layers are not stored alike."""
        ranges = self._ranges(planned)
        return {} if ranges is None else ranges.of_components(components)

    def _ranges(self, planned: PreparedGraph) -> Optional[GradientRanges]:
        return GradientRanges.where_layers_differ(self._config, self._storage, planned.plan)

    def chosen(
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
        structure, ranges = planned.plan.structure, self._ranges(planned)
        if self._by_layer and components and present and present.is_for(structure, start.fixed_scale):
            limits = Limits(self._constraints(start), self.u_max_single, ranges)
            if would_be_chosen(present, components, known, limits) and known.complete:
                return present
        choice = self._choice(planned, start, components, looks=self._ada_loss.reports)
        chooser = choose(structure, choice, known, start, self._u_max, ranges)
        if not known.complete:
            return None
        planned.statistics.forget_data(known.asked)
        self._ada_loss.take_over_all(chooser.decided)
        return chooser.schedule()

    def scheduled(
        self,
        planned: PreparedGraph,
        schedule: ScaleSchedule,
        iteration: int,
        request: PassRequest,
        found: LeafArrays,
    ) -> Union[HookedPass, HooklessPass]:
        """A pass with the scales of a schedule.

        Args:
            planned: the graph.
            schedule: the scales.
            iteration: number of the iteration.
            request: what is asked of the pass.
            found: the gradients of its leaves.
        """
        share = planned.share(iteration, by_layer=self._by_layer)
        if planned.planned_for is not schedule:
            before, planned.planned_for = planned.planned_for, schedule
            # New scales are mostly what they were.
            if before is None or not schedule.is_applied_as(before):
                planned.steps = self._plan_steps(planned.plan, schedule)
        steps, context = planned.steps, self._context(planned)
        if isinstance(steps, HooklessSteps) and request.watch is None and request.hooks is NO_HOOKS:
            return HooklessPass(
                context,
                schedule,
                steps,
                found,
                planned.measurements,
                share,
                clear_buffer=request.clear_buffer,
            )
        return HookedPass(
            context,
            ScheduledSteps(schedule),
            request.hooks,
            watch=request.watch,
            deferred=planned.measurements,
            share=share,
        )

    def choosing(
        self,
        planned: PreparedGraph,
        start: PassStart,
        components: Optional[ComponentPass],
        request: PassRequest,
    ) -> HookedPass:
        """A pass that chooses its scales as it runs.

        Args:
            planned: the graph.
            start: where it starts.
            components: what is measured of components; None: nothing.
            request: what is asked of the pass.
        """
        choice = self._choice(planned, start, components)
        return self._choosing(planned, start, choice, request)

    def of_one_scale(self, planned: PreparedGraph, start: PassStart) -> HookedPass:
        """A pass with one scale for all layers, which teaches nothing."""
        choice = ScaleChoice(OneScale(start.start_scale), AlphasOfOne())
        return self._choosing(planned, start, choice, PassRequest(clear_buffer=True))

    def _choosing(
        self, planned: PreparedGraph, start: PassStart, choice: ScaleChoice, request: PassRequest
    ) -> HookedPass:
        structure, ranges = planned.plan.structure, self._ranges(planned)
        chooser = ScaleChooser(structure, choice, planned.statistics, start, self._u_max, ranges)
        return HookedPass(
            self._context(planned),
            ChosenSteps(chooser, self._ada_loss),
            request.hooks,
            watch=request.watch,
            deferred=planned.measurements,
        )

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
        if self._by_layer and components is not None:
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

    def _context(self, planned: PreparedGraph) -> PassContext:
        return PassContext(
            planned.plan,
            self._kernels,
            planned.pool,
            planned.statistics,
            self._storage,
            self._u_max,
            self._by_layer,
        )

    def _plan_steps(self, plan: GraphPlan, schedule: ScaleSchedule) -> Union[HooklessSteps, FallbackReason]:
        storage = self._storage
        return plan_steps(
            plan,
            schedule,
            rounded=storage is not None,
            at_random=storage is not None and storage.precisions.at_random,
            max_bytes=self._max_bytes,
        )
