# SPDX-License-Identifier: Apache-2.0
"""Runs a backward pass with the scales that were decided: without hooks, if that can be."""

from __future__ import annotations

from typing import Optional, Union

from ..core.config import AdaLossConfig
from ..core.formats import get_format
from ..core.schedule import ScaleSchedule
from ..emulation.rounded_storage import NativeStorage
from ..graph.loss import LossLike, LossSeed, Seed
from ..kernels import Kernels
from ..monitor import Audience, LayerScaled
from .chooser import Decided
from .hookless_steps import HooklessSteps, plan_steps
from .layer_watch import LayerWatch, records_of
from .passes import HookedPass, HooklessPass
from .passes.backward_pass import NO_HOOKS, LeafArrays, Look, PassRequest, UserHooks
from .prepared_graph import PreparedGraph
from .report import PassReport


class PassRunner:
    """Runs the passes of one loss."""

    def __init__(
        self,
        loss: LossLike,
        seed: LossSeed,
        config: AdaLossConfig,
        kernels: Kernels,
        storage: NativeStorage,
        audience: Optional[Audience],
    ) -> None:
        self._loss, self._seed, self._config, self._kernels = loss, seed, config, kernels
        self._storage, self._audience = storage, audience

    def run(
        self,
        prepared: PreparedGraph,
        decided: Decided,
        found: LeafArrays,
        hooks: UserHooks = NO_HOOKS,
        grad: Optional[Seed] = None,
        watch: Optional[LayerWatch] = None,
        look: Optional[Look] = None,
        *,
        clear_buffer: bool,
    ) -> PassReport:
        schedule, _, measure, share = decided
        request = PassRequest(clear_buffer, hooks, watch, grad, measure, share, look if measure else None)
        if measure:
            kind = "measuring"
        elif watch is not None or hooks != NO_HOOKS:
            kind = "single functions are watched"
        else:
            known = prepared.steps.get(schedule.loss_weights)
            steps = known[1] if known is not None and known[0] is schedule else self._plan(prepared, schedule)
            if isinstance(steps, HooklessSteps):
                return HooklessPass(prepared, request, schedule, steps, found).run(self._loss, self._seed)
            kind = steps
        return HookedPass(prepared, request, schedule, kind).run(self._loss, self._seed)

    def probe(self, prepared: PreparedGraph, schedule: ScaleSchedule) -> None:
        """Run a pass of which nothing is learned."""
        request = PassRequest(clear_buffer=True)
        HookedPass(prepared, request, schedule, "it is only tried").run(self._loss, self._seed)

    def watch(
        self, prepared: PreparedGraph, decided: Decided, iteration: int, attempt: int
    ) -> Optional[LayerWatch]:
        """The watch of the layers of a pass; None in an iteration in which no monitor wants them."""
        if self._audience is None or not self._audience.wants(LayerScaled, iteration):
            return None
        structure, (schedule, chosen, *_) = prepared.plan.structure, decided
        records = records_of(structure, prepared.statistics, schedule, (iteration, attempt), chosen=chosen)
        stored = get_format(self._config.dtype or "float16")
        return LayerWatch(self._audience, self._kernels, self._storage, stored, records)

    def _plan(self, prepared: PreparedGraph, schedule: ScaleSchedule) -> Union[HooklessSteps, str]:
        """How a schedule is applied at once, or why it cannot be."""
        known = prepared.steps.get(schedule.loss_weights)
        # New scales are mostly what they were.
        if known is not None and schedule.is_applied_as(known[0]):
            steps = known[1]
        else:
            steps = plan_steps(prepared.plan, schedule, rounded=self._storage.rounds)
        prepared.keep_steps(schedule, steps)
        return steps
