# SPDX-License-Identifier: Apache-2.0
"""Runs the backward passes of one loss, without hooks where the schedule allows it; and learns from them."""

from __future__ import annotations

from functools import cached_property
from typing import Optional, Tuple, Union

import numpy as np
from numpy.typing import NDArray

from ..core.ada_loss import AdaLoss
from ..core.config import AdaLossConfig
from ..core.precision import Precision
from ..core.scale_history import HistoryPolicy
from ..emulation.rounded_storage import RoundedStorage
from ..errors import warn
from ..graph.loss import LossLike, LossSeed, check_scale, variable_of
from ..graph.plan import GraphPlan
from ..kernels import Kernels
from .blame import layer_to_blame
from .choosing import PassStart, ScaleChooser
from .component_pass import ComponentPass
from .component_scales import ComponentScales
from .passes.backward_pass import NO_HOOKS, BackwardPass, LeafArrays, PassContext, PassRequest
from .passes.hooked import ChosenSteps, HookedPass, ScheduledSteps
from .passes.hookless import HooklessPass, HooklessSteps
from .passes.hookless_steps import FallbackReason, plan_steps
from .prepared_graph import PreparedGraph
from .schedule import ScaleSchedule
from .scheduler import Scheduler

# Where host and network share the memory: a network whose scaled weights are larger has layers that take long
# beside what is done around them.
_MAX_BYTES = 2**23


def config_for(
    config: Optional[AdaLossConfig], storage: Optional[RoundedStorage], *, in_half: bool
) -> AdaLossConfig:
    """The configuration for a network, with method and dtype filled in.

    Args:
        config: what was given; None: the defaults.
        storage: an emulated storage, or None.
        in_half: whether the network computes in half precision.

    Raises:
        ValueError: `config.dtype` is not what gradients are stored in.
    """
    if config is not None and config.unused:
        ignored = " and ".join(config.unused)
        warn(f'{ignored} change nothing with the default method; give loss_scale_method="approx_range", too')
    stored = storage.precisions.narrowest if storage else Precision() if in_half else None
    return (config or AdaLossConfig()).for_network().stored_in(stored)


class BackwardRunner:
    """Decides how each pass gets its scales, runs it, and learns from it.

    Args:
        loss: what backward is called on.
        config: how scales are computed.
        ada_loss: decides about layers, and remembers.
        kernels: passes over memory.
        storage: an emulated storage, or None.
        history: how scales follow from what was measured.
        delay: 0 for scales from the statistics of this iteration, 1 from those of earlier ones.

    Attributes:
        by_layer: whether layers separate components.
    """

    def __init__(
        self,
        loss: LossLike,
        config: AdaLossConfig,
        ada_loss: AdaLoss,
        kernels: Kernels,
        storage: Optional[RoundedStorage],
        history: HistoryPolicy,
        *,
        delay: int,
    ) -> None:
        self._loss, self._seed = loss, LossSeed(variable_of(loss))
        self._ada_loss, self._delay = ada_loss, delay
        self._kernels, self._storage = kernels, storage
        self._max_bytes = config.planned_bytes
        if self._max_bytes is None and not kernels.asynchronous:
            self._max_bytes = _MAX_BYTES
        self._scheduler = Scheduler(config, ada_loss, storage)
        self.by_layer = self._scheduler.by_layer
        self._config, self._history = config, history
        # A start scale that was checked, and what comes of it.
        self._checked: Tuple[Optional[float], float] = None, 0.0

    @cached_property
    def components(self) -> ComponentScales:
        """What was measured of the network, and the scales that follow from it; of a graph that is built
        again, those of the graph before are assigned.
        """
        config, history = self._config, self._history
        policy = config.method.policy(history) if self.by_layer else history
        policy = policy.measured_every(config.iterations_per_measurement)
        return ComponentScales(policy, config.range.u_max, self._scheduler.u_max_single)

    def run(
        self,
        planned: PreparedGraph,
        iteration: int,
        scale: Optional[float],
        request: PassRequest,
        found: LeafArrays,
        *,
        again: bool,
    ) -> BackwardPass:
        """Run one pass.

        Args:
            planned: the graph.
            iteration: number of the iteration.
            scale: S0; None: measured.
            request: what is asked of the pass.
            found: the gradients of the graph's leaves.
            again: whether this is the batch of the last pass once more.

        Raises:
            ValueError: `scale` is not finite or less than 2**-126.
            GraphChangedError: the graph was rewired while backward ran.
        """
        start = PassStart(iteration, self.components.began[1], scale, self.start_scale(scale))
        new_seed = request.grad is not None
        schedule = None if again else self._schedule(planned, start, new_seed=new_seed)
        running: BackwardPass
        if schedule is not None:
            running = self._scheduled(planned, schedule, iteration, request, found)
            running.run(self._loss, self._seed)
            if running.components is not None and running.learns:
                measured, last = running.components, running.last_share
                self.components.learn(planned.components, measured, chosen=False, last=last)
        else:
            running = self._run_choosing(planned, start, request, again=again)
        running.unscale_visible()
        return running

    def probe(self, planned: PreparedGraph, iteration: int, scale: float) -> None:
        """Run a pass with one scale for all layers, and learn nothing from it."""
        start = PassStart(iteration, self.components.began[1], scale, check_scale(scale))
        chooser = self._scheduler.one_scale(planned, start)
        self._choosing(planned, PassRequest(clear_buffer=True), chooser).run(self._loss, self._seed)

    def start_scale(self, scale: Optional[float]) -> float:
        """The scale that the loss gradient starts with when nothing is known.

        Args:
            scale: S0; None: measured.

        Raises:
            ValueError: it is not finite or less than 2**-126.
        """
        given = self.components.policy.start_scale if scale is None else scale
        if type(given) is not float or given != self._checked[0]:
            check_scale(given)
            self._checked = given, check_scale(given * self._config.init_scale, "scale * init_scale")
        return self._checked[1]

    def layer_to_blame(self, last: BackwardPass) -> Optional[str]:
        """The layer whose own scale made a pass overflow; None: another scale did."""
        if not last.found_inf or self.by_layer:
            return None
        return layer_to_blame(last.plan, last.found_inf[0], last.schedule.layer_scales)

    def lower(self, last: BackwardPass) -> bool:
        """Lower what made a pass overflow: the layer to blame, or a component; False: only a lower S0 can
        help, or nothing can.
        """
        layer = self.layer_to_blame(last)
        if layer is not None:
            return self._ada_loss.back_off(layer, last.schedule.layer_scales[layer])
        measured = last.components
        if measured is None or measured.overflowed is None:
            return False
        targets = (slot.target for node in last.plan.structure.nodes for slot in node.slots)
        if not last.measures_loss and all(measured.of.get(p) != measured.overflowed for p in targets):
            return False
        return self.components.after_overflow(measured)

    def shared_statistics(
        self, planned: PreparedGraph, last: Optional[BackwardPass]
    ) -> Optional[NDArray[np.float64]]:
        """What the last pass has measured, for other ranks; None when that is nothing."""
        table = planned.statistics.table(planned.plan.structure.gradients)
        if last is None or last.schedule.components is None:
            return table
        seen = np.array(self.components.shared(planned.components.names), np.float64)
        return seen if table is None else np.concatenate([seen, table.ravel()])

    def adopt_statistics(
        self, planned: PreparedGraph, last: Optional[BackwardPass], tables: NDArray[np.float64]
    ) -> None:
        """Take what all ranks have measured for what this one has.

        Args:
            planned: the graph.
            last: the last pass.
            tables: what `shared_statistics` returned on every rank, stacked in the order of ranks.
        """
        if last is not None and last.schedule.components is not None:
            names = planned.components.names
            sent = self.components.numbers_shared(names)
            seen, tables = tables[:, :sent], tables[:, sent:]
            self.components.adopt(names, seen.max(axis=0).tolist())
        positions = planned.plan.structure.gradients
        own = planned.statistics.table(positions)
        if own is not None:
            planned.statistics.adopt(positions, tables.reshape(len(tables), *own.shape))

    def _schedule(
        self, planned: PreparedGraph, start: PassStart, *, new_seed: bool
    ) -> Optional[ScaleSchedule]:
        """The schedule in use, or the next one; None: scales are chosen as the pass runs."""
        schedule = planned.cache.current(start.iteration, start.fixed_scale)
        if schedule is not None:
            self._report_held(schedule, planned, start)
            return schedule
        # Nothing is known of a seed gradient of the caller's own.
        if not self._delay or new_seed:
            return None
        components = self._begin_components(planned, start)
        if components is not None and not self.components.has_measured(components.graph):
            return None
        planned.statistics.begin(start.iteration, again=False)
        present, schedule = planned.cache.schedule, self._scheduler.schedule(planned, start, components)
        if schedule is not None and schedule is present:
            self._report_held(schedule, planned, start)
        # What an overflow of this iteration holds down is chosen again in the next one.
        if schedule is not None and not self.components.limited:
            planned.cache.keep(schedule, start.iteration)
        return schedule

    def _report_held(self, schedule: ScaleSchedule, planned: PreparedGraph, start: PassStart) -> None:
        if self._ada_loss.observed:
            for record in schedule.records(planned.plan.structure, start.iteration, start.attempt):
                self._ada_loss.report(record)

    def _run_choosing(
        self,
        planned: PreparedGraph,
        start: PassStart,
        request: PassRequest,
        *,
        again: bool,
    ) -> HookedPass:
        planned.statistics.begin(start.iteration, again=again and start.fixed_scale is None)
        components = self._begin_components(planned, start)
        running = self._choosing(planned, request, self._scheduler.chooser(planned, start, components))
        running.run(self._loss, self._seed)
        if components is not None:
            self.components.learn(planned.components, components, chosen=True, last=True)
            if not running.found_inf:
                self.components.keep_batch()
        planned.cache.drop()
        complete = components is None or (components.complete and self.components.settled)
        if planned.cache.wanted(start.fixed_scale) and complete and not running.found_inf:
            planned.cache.keep(running.schedule, start.iteration)
        return running

    def _begin_components(self, planned: PreparedGraph, start: PassStart) -> Optional[ComponentPass]:
        if start.fixed_scale is not None and not self.by_layer:
            return None
        limits = self._scheduler.limits(planned.plan, planned.components)
        begun = self.components.begin(planned.components, limits)
        if self.by_layer:
            begun.level()
        return begun

    def _scheduled(
        self,
        planned: PreparedGraph,
        schedule: ScaleSchedule,
        iteration: int,
        request: PassRequest,
        found: LeafArrays,
    ) -> BackwardPass:
        """A pass with the scales of a schedule: without hooks, if that can be."""
        share = planned.share(iteration)
        if planned.planned_for is not schedule:
            before, planned.planned_for = planned.planned_for, schedule
            # New scales are mostly what they were.
            if before is None or not schedule.is_applied_as(before):
                planned.steps = self._plan_steps(planned.plan, schedule)
        context, deferred, steps = self._context(planned), planned.measurements, planned.steps
        if isinstance(steps, HooklessSteps) and request.watch is None and request.hooks is NO_HOOKS:
            return HooklessPass(context, request, schedule, steps, found, deferred, share)
        return HookedPass(context, request, ScheduledSteps(schedule), deferred=deferred, share=share)

    def _choosing(self, planned: PreparedGraph, request: PassRequest, chooser: ScaleChooser) -> HookedPass:
        """A pass that chooses its scales as it runs."""
        steps = ChosenSteps(chooser, self._ada_loss)
        return HookedPass(self._context(planned), request, steps, deferred=planned.measurements)

    def _context(self, planned: PreparedGraph) -> PassContext:
        return PassContext(
            planned.plan,
            self._kernels,
            planned.pool,
            planned.statistics,
            self._storage,
            planned.components,
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
