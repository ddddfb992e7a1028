# SPDX-License-Identifier: Apache-2.0
"""Choice of a pass's schedule, new or in use, and of the arrays that it measures."""

from __future__ import annotations

import math
from typing import Any, Dict, Mapping, NamedTuple, Optional, Tuple

from ..core.alpha_bounds import AlphaBounds, alpha_bounds, spare_of
from ..core.choose import Choice, ScaleLimits, Start, choose, choose_merged
from ..core.components import Components
from ..core.config import AdaLossConfig
from ..core.formats import FLOAT16, get_format
from ..core.memory import Observations
from ..core.power_of_two import floor_power_of_two
from ..core.scale_history import HistoryPolicy
from ..core.schedule import ScaleSchedule
from ..core.schedule_cache import ScheduleCache
from ..graph.loss import check_scale
from .method_alphas import MethodAlphas
from .prepared_graph import PreparedGraph
from .slices import Slice

_NORMAL_SPAN = 2.0**8


class Request(NamedTuple):
    """Request for the scales of a pass."""

    iteration: int
    scale: Optional[float]  # S0, if given
    weights: Tuple[float, ...]  # loss weight of each component
    rerun: bool = False  # True for a repeat of the last pass's batch
    seeded: bool = False  # True for a seed gradient given by the caller


class Decision(NamedTuple):
    """Decision about a pass."""

    schedule: ScaleSchedule
    schedules: ScheduleCache  # in use from now on
    chosen: bool = False  # True if the schedule has changed
    measure: bool = False  # True if every gradient is measured
    slice: Optional[Slice] = None  # arrays to measure otherwise; None: none


class Chooser:
    """Makes the decisions about the passes of one loss."""

    def __init__(self, config: AdaLossConfig, method_alphas: MethodAlphas, *, delayed: bool) -> None:
        self.method_alphas = method_alphas
        self._config, self._delayed = config, delayed
        # Allowed distance of a leaf's amax below the end of the range: gradients `_NORMAL_SPAN` times smaller
        # are then still normal numbers.
        stored = get_format(config.dtype or "float16")
        self._spread = min(config.range.u_max, stored.max) / (_NORMAL_SPAN * stored.smallest_normal)
        self._spare = spare_of(stored)
        # The last checked start scale and its result.
        self._checked: Tuple[Optional[float], float] = None, 0.0

    def start_scale(self, given: float) -> float:
        """Initial scale of the loss gradient, from S0 or from an engine's start scale."""
        if type(given) is not float or given != self._checked[0]:
            check_scale(given)
            self._checked = given, check_scale(given * self._config.init_scale, "scale * init_scale")
        return self._checked[1]

    def go_on(
        self, prepared: PreparedGraph, observations: Observations, request: Request
    ) -> Optional[Decision]:
        """Continue with a schedule in use, or with one moved to new loss weights; None: choose scales."""
        iteration, scale, weights, rerun, _ = request
        in_use = prepared.schedules
        schedule = None if rerun else in_use.current(iteration, scale, weights)
        if schedule is None and not rerun:
            schedule = in_use.moved(iteration, scale, weights, observations.memory.policy.max_scale)
            if schedule is not None:
                in_use = in_use.keep(schedule, iteration)
        if schedule is None:
            return None
        return Decision(schedule, in_use, slice=prepared.slice(in_use, iteration, scale))

    def decide(self, prepared: PreparedGraph, observations: Observations, request: Request) -> Decision:
        """Choose the scales of the next pass."""
        iteration, scale, weights, rerun, seeded = request
        in_use, policy = prepared.schedules, observations.memory.policy
        limits = observations.limits(prepared.components, weights, prepared.u_maxes)
        unmeasured = any(weights[i] and limits.unit_amaxes[i] is None for i in prepared.components.computed)
        unknown = unmeasured or prepared.statistics.is_incomplete
        # The caller's seed gradient may be another one in each batch.
        measure = (rerun or unknown or not self._delayed or seeded) and not in_use.for_good(scale)
        # Kept is a schedule from measurements of all layers: with delay=1 of earlier iterations, exchanged
        # between the ranks; with delay=0 of this batch. One lowered by an overflow is for this batch only.
        kept = not (measure or observations.not_exchanged) if self._delayed else rerun or not measure
        # A pass that measures has hooks anyway.
        schedule, origin = self._next(prepared, limits, policy, request, split=measure and not kept)
        kept = kept and not observations.provisional
        schedules = in_use.keep(schedule, iteration, origin) if kept else in_use.drop()
        part = None if measure else prepared.slice(schedules, iteration, scale)
        return Decision(schedule, schedules, schedule is not in_use.last(weights), measure, part)

    def _next(
        self,
        prepared: PreparedGraph,
        limits: ScaleLimits,
        policy: HistoryPolicy,
        request: Request,
        *,
        split: bool,
    ) -> Tuple[ScaleSchedule, Any]:
        """Choose the next schedule, unless the inputs of the choice, its origin, are as before; return both.
        `split`: merge nothing.
        """
        components, plan, scale = prepared.components, prepared.plan, request.scale
        weights, of = request.weights, components.of
        method_alpha = self.method_alphas.alpha_function(
            plan,
            prepared.statistics,
            request.iteration,
            prepared.ranges,
            lambda p: weights[of[p]],
            fixed=scale is not None,
        )
        floors = {i: limit / self._spare for i, limit in enumerate(limits.limits) if limit is not None}
        limits = limits._replace(bounds=_bounds(prepared, self._config), floors=floors)
        if prepared.schedules.for_good(scale):
            limits = limits._replace(limits=[None] * len(weights))
        origin: Any = None
        present: Optional[ScaleSchedule] = None
        last_origin: Any = None
        if not request.rerun and weights in prepared.schedules.chosen:
            _, present, last_origin = prepared.schedules.chosen[weights]
            if present.nodes is not plan.nodes:
                present = None
        if method_alpha is None:
            # Usually the choice would be the same: compare its origins. Amaxes matter only if some limit is
            # unknown; that of a scalar loss always is.
            unit_amaxes = limits.unit_amaxes if None in limits.limits[1:] else ()
            origin = limits._replace(unit_amaxes=unit_amaxes), scale, request.seeded, split
            if present is not None and last_origin == origin:
                return present, origin

        def choice_of(components: Components, limits: ScaleLimits) -> Choice:
            start = self._start(components, limits, prepared.u_maxes[components.root], policy, request)
            if scale is not None:
                limits = limits.with_s0(components, start.start_scale)
            return choose(components, limits, start, method_alpha)

        merged = None if split else prepared.merged
        if merged is not None and scale is not None:
            # The loss gradient itself has the scale S0.
            root = merged.components.root
            merged = merged if root in merged.components.at_loss else None
        choice = merged and choose_merged(components, merged, limits, choice_of, self._spread / policy.margin)
        if choice is None:
            choice, merged = choice_of(components, limits), None
        if present is None or (present.given_scale, present.component_scales) != (scale, choice.scales):
            present = prepared.schedule(
                choice.scales, scale, request.weights, merged, choice.reasons, self.method_alphas.unbounded
            )
        return present, origin

    def _start(
        self,
        components: Components,
        limits: ScaleLimits,
        u_max: float,
        policy: HistoryPolicy,
        request: Request,
    ) -> Start:
        """Start of a pass's scales; `u_max`: the largest magnitude of the loss gradient."""
        start_scale = self.start_scale(policy.start_scale if request.scale is None else request.scale)
        span = self._config.range.u_max / (policy.margin * self._config.range.u_min)
        if request.scale is not None:
            root_scale = min(start_scale, limits.provisional.get(components.root, math.inf))
        elif components.root in components.scalars and not request.seeded:
            # The loss gradient is 1.
            root_scale = min(floor_power_of_two(u_max), policy.max_scale)
        else:
            root_scale = limits.of_root(start_scale, span)
        return Start(root_scale, start_scale, span, self._config.power_of_two)


def _bounds(prepared: PreparedGraph, config: AdaLossConfig) -> Mapping[int, AlphaBounds]:
    """Bounds of alphas, by position of the weight."""
    # Scaled copies of weights are stored like weights.
    plan, storage, ranges = prepared.plan, prepared.storage, prepared.ranges
    largest = min(config.range.u_max, storage.largest_weight)
    bounds: Dict[int, AlphaBounds] = {}
    recomputed, shapes = plan.described.recomputed, plan.described.shapes
    for _, layer_input in plan.layer_inputs.values():
        position = layer_input.weight
        weight = prepared.statistics.data(position)
        if weight is None and (position in prepared.statistics.wanted.data or recomputed[position]):
            # Until it is measured, its copies must not exceed it.
            bounds[position] = AlphaBounds(1.0)
        elif weight is not None and weight.abs_max:
            u_max = largest if ranges is None else ranges.of_weight(layer_input)
            stored = storage.copy_format(prepared.graph.keys[position], math.prod(shapes[position]))
            own = alpha_bounds(weight.abs_max, u_max, FLOAT16 if layer_input.half else stored)
            bounds[position] = own.intersection(bounds.get(position, own))
    return bounds
