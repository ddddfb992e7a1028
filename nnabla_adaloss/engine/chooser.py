# SPDX-License-Identifier: Apache-2.0
"""Choice of a pass's schedule, new or in use, and of the arrays that it measures."""

from __future__ import annotations

import math
from typing import Callable, Dict, Mapping, NamedTuple, Optional, Tuple

from ..core.choose import Choice, ScaleLimits, Start, choose, choose_merged
from ..core.components import Components, NodeStructure
from ..core.config import AdaLossConfig
from ..core.formats import FLOAT16, get_format
from ..core.layer_alpha import AlphaBounds, alpha_bounds, spare_of
from ..core.memory import Observations
from ..core.power_of_two import floor_power_of_two
from ..core.scale_history import HistoryPolicy
from ..core.schedule import ScaleSchedule
from ..core.schedule_cache import ScheduleCache
from ..graph.graph import Graph
from ..graph.loss import check_scale
from .method_alphas import MethodAlphas
from .prepared_graph import PreparedGraph
from .slices import Slice

# Ratio of the largest gradient of a leaf to the smallest that must still keep all its bits.
_NORMAL_SPAN = 2.0**8


class Request(NamedTuple):
    """Request for the scales of a pass."""

    iteration: int
    given_scale: Optional[float]  # S0; None: it is measured
    loss_weights: Tuple[float, ...]  # of each component
    rerun: bool = False  # True for a repeat of the last pass's batch
    seeded: bool = False  # True for a seed gradient given by the caller


class Decision(NamedTuple):
    """Decision about a pass."""

    schedule: ScaleSchedule
    schedules: ScheduleCache  # in use from now on
    is_new: bool = False  # True if the schedule is new for its loss weights
    measure_all: bool = False  # True if every gradient is measured
    slice: Optional[Slice] = None  # arrays to measure; None: none
    # Copies the arrays of a function's layers, at this scale of its output gradient, if a method needs them.
    copier: Optional[Callable[[Graph, NodeStructure, float], None]] = None


class Chooser:
    """Makes the decisions about the passes of one loss."""

    def __init__(self, config: AdaLossConfig) -> None:
        self.method_alphas, self._config = MethodAlphas(config), config
        # A leaf's amax may lie this factor below the end of the range: then gradients `_NORMAL_SPAN` times
        # smaller are still normal numbers. Components are not merged if their common scale is lower still.
        stored = get_format(config.dtype or "float16")
        self._spread = min(config.range.u_max, stored.max) / (_NORMAL_SPAN * stored.smallest_normal)
        self._spare = spare_of(stored)

    def start_scale(self, scale: float) -> float:
        """Checked initial scale of the loss gradient: a given S0, or the start scale, times `init_scale`."""
        return check_scale(check_scale(scale) * self._config.init_scale, "scale * init_scale")

    def decide(self, prepared: PreparedGraph, observations: Observations, request: Request) -> Decision:
        """Decide which schedule the next pass has, one in use or a new one, and which arrays it measures."""
        iteration, given_scale, loss_weights, rerun, seeded = request
        in_use, policy = prepared.schedules, observations.memory.policy
        # A rerun always chooses: the last scales did not suit its batch, which has been measured since.
        if not rerun:
            schedule = in_use.current(iteration, given_scale, loss_weights)
            if schedule is None:
                # If loss weights changed, as by a factor that decays, the latest schedule is adapted.
                schedule = in_use.convert_latest(loss_weights, iteration, given_scale, policy.max_scale)
                in_use = in_use if schedule is None else in_use.keep(schedule, iteration)
            if schedule is not None:
                return Decision(schedule, in_use, slice=prepared.slice(in_use, iteration, given_scale))
        prepared.statistics.begin(iteration, rerun=rerun)
        limits = observations.limits(prepared.components, loss_weights, prepared.u_maxes)
        # An inactive component needs no scale, measured or not.
        active = [index for index in prepared.components.computed if loss_weights[index]]
        unmeasured = any(limits.unit_amaxes[index] is None for index in active)
        unknown = unmeasured or prepared.statistics.is_incomplete
        # Earlier amaxes do not suffice for a given seed gradient, which may be another one in each batch.
        needs_all = rerun or seeded or unknown or not self.method_alphas.delay
        # Constant scales need no measurements.
        measure_all = needs_all and not in_use.measures_nothing(given_scale)
        # A choice is complete if it knows all layers: only then may later iterations use its schedule.
        if self.method_alphas.delay:
            # Measurements of this iteration are not exchanged yet: other ranks would have other schedules.
            is_complete = not (measure_all or observations.measured_all)
        else:
            # The first pass over this batch has measured all.
            is_complete = rerun or not measure_all
        # Merging components saves passes their hooks. A pass that measures all has hooks anyway: it merges
        # only if its choice is complete, so that later passes use the schedule, or an equal one.
        split = measure_all and not is_complete
        schedule = self._choose(prepared, limits, policy, request, split=split)
        # Incomplete schedules, and those with provisional limits after an overflow, are for this batch only.
        is_reusable = is_complete and not observations.provisional
        schedules = in_use.keep(schedule, iteration) if is_reusable else in_use.drop()
        measured = prepared.all_arrays if measure_all else prepared.slice(schedules, iteration, given_scale)
        is_new = schedule is not in_use.last(loss_weights)
        copier = self.method_alphas.copier if measure_all else None
        return Decision(schedule, schedules, is_new, measure_all, measured, copier)

    def _choose(
        self,
        prepared: PreparedGraph,
        limits: ScaleLimits,
        policy: HistoryPolicy,
        request: Request,
        *,
        split: bool,  # True: no components are merged
    ) -> ScaleSchedule:
        """Choose the schedule of a pass within limits."""
        components, given_scale, loss_weights = prepared.components, request.given_scale, request.loss_weights
        method_alpha = self.method_alphas.alpha_function(
            prepared, request.iteration, loss_weights, s0_measured=given_scale is None
        )
        # Below these scales gradients lose bits: they are not lowered further for bits of weights' copies.
        floors = {i: limit / self._spare for i, limit in enumerate(limits.limits) if limit is not None}
        limits = limits._replace(bounds=_bounds(prepared), floors=floors)
        if prepared.schedules.measures_nothing(given_scale):
            # All scales are S0, whatever was measured.
            limits = limits._replace(limits=[None] * len(loss_weights))
        # S0 at loss weight 1, given or initial: unmeasured components get their scales from it.
        start_scale = self.start_scale(policy.start_scale if given_scale is None else given_scale)
        # Ratio of the largest magnitude that limits allow, u_max / margin, to the smallest in range.
        span = self._config.range.u_max / (policy.margin * self._config.range.u_min)

        def choice_of(components: Components, limits: ScaleLimits) -> Choice:
            if given_scale is not None:
                # A given S0, lower only after an overflow of the loss gradient itself.
                root_scale = min(start_scale, limits.provisional.get(components.root, math.inf))
                limits = limits.with_s0(components, start_scale)
            elif components.root in components.scalar_components and not request.seeded:
                # The loss gradient is 1: it cannot overflow at the largest scale that its format allows, from
                # which the scales of its successors are lowered to their own limits.
                root_scale = min(floor_power_of_two(prepared.u_maxes[components.root]), policy.max_scale)
            else:
                root_scale = limits.root_scale(start_scale, span)
            start = Start(root_scale, start_scale, span, self._config.power_of_two)
            return choose(components, limits, start, method_alpha)

        merged = None if split else prepared.merged
        if merged and given_scale is not None and merged.components.root not in merged.components.at_loss:
            # Merged with arrays after layers, the loss gradient could get a scale below the given S0.
            merged = None
        # None if nothing is merged, or split scales are so much higher that hooks are worth their time.
        choice = merged and choose_merged(components, merged, limits, choice_of, self._spread / policy.margin)
        is_merged = choice is not None
        choice = choice or choice_of(components, limits)
        # An equal schedule, the last for these loss weights, is used again, as its steps are cached. A rerun
        # needs its own, with new reasons; the nodes of a rebuilt graph may be others.
        last = None if request.rerun else prepared.schedules.last(loss_weights)
        if (
            last is not None
            and last.nodes is prepared.plan.nodes
            and (last.given_scale, last.component_scales) == (given_scale, choice.scales)
        ):
            return last
        reasons, unbounded = choice.reasons, self.method_alphas.unbounded_alphas  # set by `method_alpha`
        return prepared.schedule(choice.scales, given_scale, loss_weights, reasons, unbounded, is_merged)


def _bounds(prepared: PreparedGraph) -> Mapping[int, AlphaBounds]:
    """Bounds of alphas, by position of the weight: its scaled copy must be in range, and keep its bits."""
    described, statistics, storage = prepared.plan.described, prepared.statistics, prepared.storage
    bounds: Dict[int, AlphaBounds] = {}
    for _, layer_input in prepared.plan.layer_inputs.values():
        position = layer_input.weight
        weight = statistics.data(position)
        if weight is None:
            if position in statistics.request.data or described.recomputed[position]:
                # The copy of an unmeasured weight could overflow if it were larger than the weight; not in
                # float32, for which weights are not requested. Recomputed ones cannot be measured.
                bounds[position] = AlphaBounds(1.0)
        elif weight.abs_max:
            key, size = prepared.graph.keys[position], math.prod(described.shapes[position])
            stored = storage.data_format(key, size)
            # In native half the copy has the format of gradients. A `u_max` given by the user bounds all that
            # loss scaling enlarges: copies, too.
            largest = prepared.range_of(layer_input.input).u_max
            largest = largest if stored is None else min(largest, stored.max)
            copy_format = FLOAT16 if layer_input.half else storage.copy_format(key, size)
            of_layer = alpha_bounds(weight.abs_max, largest, copy_format)
            # Several layers may read one weight: their copies are one array.
            bounds[position] = of_layer.intersection(bounds.get(position, of_layer))
    return bounds
