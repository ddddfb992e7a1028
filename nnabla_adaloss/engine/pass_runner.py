# SPDX-License-Identifier: Apache-2.0
"""One backward pass: its scales are chosen or kept, it runs, and what it has shown is learned."""

from __future__ import annotations

import math
from functools import partial
from typing import Callable, Dict, List, Optional, Tuple, Union

from ..core.config import AdaLossConfig
from ..core.formats import get_format
from ..core.layer_record import LayerObserver, LayerRecord
from ..core.power_of_two import floor_power_of_two
from ..core.scale_history import HistoryPolicy
from ..emulation.rounded_storage import RoundedStorage
from ..graph.components import Components
from ..graph.loss import LossLike, LossSeed, Seed, check_scale
from ..kernels import Kernels
from ..monitor import Audience, LayerScaled
from .choose import Choice, Room, Start, choose, choose_together, within_float32
from .component_scales import ComponentScales
from .hookless_steps import HooklessSteps, plan_steps
from .layer_watch import LayerWatch, records_of
from .passes import HookedPass, HooklessPass
from .passes.backward_pass import NO_HOOKS, LeafArrays, PassRequest, UserHooks
from .prepared_graph import PreparedGraph
from .report import PassReport
from .schedule import ScaleSchedule
from .wishes import Wishes

# Where host and network share the memory: a network whose scaled weights are larger has layers that take long
# beside what is done around them.
_MAX_BYTES = 2**23

_KEPT = 2.0**8


class PassRunner:
    """Runs the passes of one loss."""

    def __init__(
        self,
        loss: LossLike,
        seed: LossSeed,
        config: AdaLossConfig,
        kernels: Kernels,
        storage: Optional[RoundedStorage],
        audience: Optional[Audience],
        *,
        delayed: bool,
    ) -> None:
        self._loss, self._seed, self._config, self._kernels = loss, seed, config, kernels
        self._storage, self._audience, self._delayed = storage, audience, delayed
        self._observer = LayerObserver(config.recorder, config.debug_level)
        # Whether anybody is told of layers.
        self.has_watchers = audience is not None or self._observer.needed
        self._max_bytes = config.planned_bytes
        if self._max_bytes is None and not kernels.asynchronous:
            self._max_bytes = _MAX_BYTES
        # How far the largest gradients of a leaf may lie below the end of the range, so that what is smaller
        # by a factor of `_KEPT` still has full precision.
        stored = get_format(config.dtype or "float16")
        self._spread = min(config.range.u_max, stored.max) / (_KEPT * stored.smallest_normal)
        # A start scale that was checked, and what comes of it.
        self._checked: Tuple[Optional[float], float] = None, 0.0

    def base(self, given: float) -> float:
        """What the loss gradient starts with, of S0 or of the scale with which an engine starts."""
        if type(given) is not float or given != self._checked[0]:
            check_scale(given)
            self._checked = given, check_scale(given * self._config.init_scale, "scale * init_scale")
        return self._checked[1]

    def run(
        self,
        planned: PreparedGraph,
        components: ComponentScales,
        wishes: Wishes,
        iteration: int,
        scale: Optional[float],
        weights: Tuple[float, ...],
        found: LeafArrays,
        hooks: UserHooks,
        grad: Optional[Seed],
        *,
        clear_buffer: bool,
        again: bool,
    ) -> PassReport:
        """Run one pass, with the schedule in use or the next one, and learn from it."""
        cache, graph, statistics = planned.cache, planned.components, planned.statistics
        schedule = None if again else cache.current(iteration, scale, weights)
        if schedule is None and scale is None and not again:
            schedule = cache.moved(iteration, weights, components.policy.max_scale)
            if schedule is not None:
                cache.keep(schedule, iteration)
        learns, measure, chosen = not cache.for_good(scale), False, False
        if schedule is None:
            statistics.begin(iteration, again=again)
            known = components.room(graph, weights, planned.limits)
            unmeasured = any(weights[i] and known.gain[i] is None for i in graph.measured)
            unknown = unmeasured or statistics.lacks_weights
            # Nothing is known of a seed gradient of the caller's own.
            measure = learns and (again or unknown or not self._delayed or grad is not None)
            before, seeded = cache.last(weights), grad is not None
            # Chosen again in the next iteration is what an overflow of this one holds down, and with delay=1
            # what a batch of this one has shown: it is that of this rank alone.
            kept = not (measure or components.alone) if self._delayed else again or not measure
            schedule = self._next(
                planned,
                known,
                components.policy,
                wishes,
                iteration,
                scale,
                seeded=seeded,
                again=again,
                # A pass that measures has hooks anyway.
                apart=measure and not kept,
            )
            chosen = schedule is not before
            if kept and not components.limited:
                cache.keep(schedule, iteration)
            else:
                cache.drop()
        share = None if measure or not learns else planned.share(iteration)
        watch = None
        if self.has_watchers:
            which = iteration, components.began[1]
            records = partial(records_of, planned.plan.structure, statistics, schedule, which, chosen=chosen)
            watch = self._told(iteration, records)
        look = wishes.look_at if measure and wishes.look_at_arrays else None
        request = PassRequest(clear_buffer, hooks, watch, grad, measure, share, look)
        report = self._pass(planned, schedule, request, found)
        if measure or share is not None:
            components.learn(graph, planned.limits, report, last=share is None or share.last)
            if measure and not report.found_inf:
                components.keep_batch()
        if measure and not (self._delayed or again):
            # These statistics are what the batch is to be scaled by.
            components.settled = False
        return report

    def probe(self, planned: PreparedGraph, scale: float) -> None:
        """Run a pass with one scale for all, but for their loss weights, and learn nothing from it."""
        weights = planned.loss_weights()
        scales = [within_float32(scale / (weight or 1.0)) for weight in weights]
        schedule = ScaleSchedule(planned.plan.structure, planned.components, scales, scale, weights)
        request = PassRequest(clear_buffer=True)
        HookedPass(planned, request, schedule, "it is only tried").run(self._loss, self._seed)

    def _pass(
        self, planned: PreparedGraph, schedule: ScaleSchedule, request: PassRequest, found: LeafArrays
    ) -> PassReport:
        """Run a pass: without hooks, if that can be."""
        if request.measure_all:
            kind = "measuring"
        elif request.watch is not None or request.hooks != NO_HOOKS:
            kind = "single functions are watched"
        else:
            steps = self._steps(planned, schedule)
            if isinstance(steps, HooklessSteps):
                return HooklessPass(planned, request, schedule, steps, found).run(self._loss, self._seed)
            kind = steps
        return HookedPass(planned, request, schedule, kind).run(self._loss, self._seed)

    def _steps(self, planned: PreparedGraph, schedule: ScaleSchedule) -> Union[HooklessSteps, str]:
        """How a schedule is applied at once, or why it cannot be."""
        known = planned.steps.get(schedule.weights)
        if known is not None and known[0] is schedule:
            return known[1]
        # New scales are mostly what they were.
        if known is not None and schedule.is_applied_as(known[0]):
            steps = known[1]
        else:
            rounded = self._storage is not None
            steps = plan_steps(planned.plan, schedule, rounded=rounded, max_bytes=self._max_bytes)
        planned.keep_steps(schedule, steps)
        return steps

    def _told(self, iteration: int, records: Callable[[], List[LayerRecord]]) -> Optional[LayerWatch]:
        """Report the scales of a pass to whoever records them; who is told of its layers as they run."""
        audience = self._audience
        watched = audience is not None and audience.wants(LayerScaled, iteration)
        if not (watched or self._observer.needed):
            return None
        found = records()
        if self._observer.needed:
            for record in found:
                self._observer(record)
        if audience is None or not watched:
            return None
        stored = get_format(self._config.dtype or "float16")
        return LayerWatch(audience, self._kernels, self._storage, stored, found)

    def _next(
        self,
        planned: PreparedGraph,
        known: Room,
        policy: HistoryPolicy,
        wishes: Wishes,
        iteration: int,
        scale: Optional[float],
        *,
        seeded: bool,
        again: bool,
        apart: bool,
    ) -> ScaleSchedule:
        """The next schedule; the one in use, if it would be chosen again. What only hooks could part shares a
        scale, unless it is to be chosen `apart`, or a leaf would lose its gradient.
        """
        config, graph, structure = self._config, planned.components, planned.plan.structure
        weights, of = known.weight, graph.of
        wish = wishes.about(
            structure,
            planned.statistics,
            iteration,
            planned.ranges,
            lambda p: weights[of[p]],
            fixed=scale is not None,
        )
        weight_room, origin = _weight_room(planned, config), None
        present = None if again else planned.cache.last(weights)
        if present is not None and present.structure is not structure:
            present = None
        if wish is None and scale is None:
            # Mostly what is known is what it was. Gains count behind what is unknown; a loss of one element
            # is never measured.
            gains = known.gain if None in known.room[1:] else None
            origin = known._replace(gain=gains or ()), weight_room, seeded, apart
            if present is not None and planned.chosen[0] is present and planned.chosen[1] == origin:
                return present

        def choice_of(graph: Components, known: Room) -> Choice:
            start = self._start(graph, known, planned.limits[graph.root], policy, scale, seeded=seeded)
            return choose(graph, known, start, wish, weight_room, power_of_two=config.power_of_two)

        joined = None if apart else planned.joined
        # The loss gradient itself has S0.
        if joined is not None and scale is not None and joined.of[graph.root] not in joined.graph.governed:
            joined = None
        choice = joined and choose_together(graph, joined, known, choice_of, self._spread / policy.margin)
        if choice is None:
            choice, joined = choice_of(graph, known), None
        if present is not None and (present.fixed_scale, present.components) == (scale, choice.scales):
            planned.chosen = present, origin
            return present
        made = ScaleSchedule(
            structure,
            graph,
            choice.scales,
            scale,
            weights,
            choice.reasons,
            wishes.unbounded,
            joined,
            planned.in_float,
        )
        planned.chosen = made, origin
        return made

    def _start(
        self,
        graph: Components,
        known: Room,
        limit: float,
        policy: HistoryPolicy,
        scale: Optional[float],
        *,
        seeded: bool,
    ) -> Start:
        """What a pass starts with; `limit`: how large the loss gradient can be."""
        # What the loss gradient starts with when nothing is known: S0, where it is given.
        base = self.base(policy.start_scale if scale is None else scale)
        u_min, u_max = self._config.range
        single = graph.names[graph.root] in graph.single and not seeded
        if scale is not None:
            amax = [None if gain is None else gain * weight for gain, weight in zip(known.gain, known.weight)]
            return Start(base, base, u_min, True, [1.0, *amax[1:]] if single else amax, u_max)
        if not single:
            return Start(known.of_root(base, u_min), base, u_min)
        # The loss gradient is 1.
        return Start(min(floor_power_of_two(limit), policy.max_scale), base, u_min)


def _weight_room(planned: PreparedGraph, config: AdaLossConfig) -> Dict[int, float]:
    """By position of a weight, the largest alpha with which its scaled copy stays in range: 1 if it was
    not measured.
    """
    largest, ranges = config.range.u_max, planned.ranges
    found: Dict[int, float] = {}
    if planned.storage is not None:
        # Scaled copies of weights are stored as weights are.
        largest = min(largest, planned.storage.precisions.narrowest.stored_data.max)
    recomputed = planned.plan.structure.described.recomputed
    for _, slot in planned.plan.structure.layer_slots.values():
        weight = planned.statistics.data(slot.factor)
        if weight is None and (slot.factor in planned.statistics.wanted.data or recomputed[slot.factor]):
            found[slot.factor] = 1.0
        elif weight is not None and weight.abs_max:
            own = largest if ranges is None else ranges.of_weight(slot)
            room = max(floor_power_of_two(own / weight.abs_max), 1.0)
            found[slot.factor] = min(room, found.get(slot.factor, math.inf))
    return found
