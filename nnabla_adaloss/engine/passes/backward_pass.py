# SPDX-License-Identifier: Apache-2.0
"""Backward pass with the scales of a schedule, from the first swapped array to the report."""

from __future__ import annotations

from typing import Optional, Tuple

from ...core.schedule import ScaleSchedule
from ...graph.hooks import HookGuard
from ...graph.loss import LossLike, LossSeed, run_backward
from ...kernels.arrays import stored_dtype
from ..chooser import Decision
from ..hookless_steps import HooklessSteps, plan_steps
from ..layer_watch import LayerWatch
from ..prepared_graph import PreparedGraph
from ..report import FinishedPass, PassReport
from .hooked import HookedPass, PassInputs
from .hookless import HooklessPass


def run_pass(
    loss: LossLike,
    seed: LossSeed,
    prepared: PreparedGraph,
    decision: Decision,
    inputs: PassInputs,
    watch: Optional[LayerWatch] = None,  # reports each layer as it runs
) -> PassReport:
    """Run the backward of `loss`, and restore all swapped arrays, also after exceptions."""
    schedule, statistics = decision.schedule, prepared.statistics
    steps, kind = _steps_for(prepared, decision, inputs, watch)
    running = (
        HookedPass(prepared, decision, inputs, watch)
        if steps is None
        else HooklessPass(prepared, decision, inputs, steps)
    )
    # nnabla does not stop backward when a hook raises: arrays are restored at once.
    guard = HookGuard(running.restore)
    try:
        before, after = running.begin()
        hooks = guard.chain(*before), guard.chain(*after)
        arguments = schedule.seed_scale, inputs.grad, inputs.clear_buffer, inputs.callbacks, *hooks, seed
        guard.run(lambda: run_backward(loss, *arguments))
        written = running.end()
        gradients, results = statistics.finish(schedule.loss_weight_of)
        report = FinishedPass(prepared, decision, written, gradients, results).report(kind)
        _unscale_readable(prepared, schedule, clear_buffer=inputs.clear_buffer)
        return report
    except BaseException:
        running.restore()
        # Results of this pass are fetched, or the next pass would take them for its own.
        statistics.finish(schedule.loss_weight_of)
        raise


def _steps_for(
    prepared: PreparedGraph, decision: Decision, inputs: PassInputs, watch: Optional[LayerWatch]
) -> Tuple[Optional[HooklessSteps], str]:
    """Find the steps of a pass and its kind; if it needs hooks, None and the reason, as its kind."""
    if decision.measure_all:
        return None, "measuring"
    if not (watch is inputs.callbacks is inputs.pre_hook is inputs.post_hook is None):
        return None, "single functions are watched"
    # Component scales determine the steps: a new schedule usually has the scales, and steps, of an old one.
    scales = tuple(decision.schedule.component_scales)
    if scales not in prepared.steps:
        # Forget the steps of schedules that are not in use any more.
        in_use = {tuple(one.schedule.component_scales) for one in prepared.schedules.entries.values()}
        kept = {earlier: planned for earlier, planned in prepared.steps.items() if earlier in in_use}
        prepared.steps = {**kept, scales: plan_steps(prepared, decision.schedule)}
    return prepared.steps[scales]


def _unscale_readable(prepared: PreparedGraph, schedule: ScaleSchedule, *, clear_buffer: bool) -> None:
    """Unscale the gradients of variables between functions, if they stay readable after the pass."""
    plan, variables, scales = prepared.plan, prepared.variables, schedule.scales
    for variable, position in zip(variables, plan.gradients):
        if clear_buffer and not (variable.persistent or position in plan.kept_gradients):
            continue  # nnabla has freed it
        scale, array = scales.get(position, 1.0), variable.grad
        # A user may have freed the array, and some functions write no gradient, which stays lazily zero.
        if scale != 1.0 and not array.clear_called and stored_dtype(array) is not None:
            prepared.kernels.scale_(array, 1.0 / scale)
