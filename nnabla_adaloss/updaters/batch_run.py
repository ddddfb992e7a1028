# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of one batch, repeated until its gradients are finite."""

from __future__ import annotations

from typing import Any, Optional

import numpy as np

from ..engine.report import PassReport
from ..monitor import BatchRepeated, Overflowed
from .global_scale import GlobalScale
from .outcome import BatchOutcome, examine, find_fault, smallest_scale_helps
from .retries import RetryState
from .settings import PassHooks, Settings

# After this many repeats of one batch a fault in forward is looked for, and the smallest scale tried; once a
# batch was hopeless, at the first overflow of those after it.
_REPEATS_BEFORE_SMALLEST = 3


class BatchRunner:
    """Runs the batches of an updater, whose settings and engine are those of the moment. `lock` is held while
    parameters are swapped, `repeat` says whether a batch that overflows runs again.
    """

    def __init__(self, s0: GlobalScale, lock: Any, hooks: PassHooks, *, repeat: bool) -> None:
        self._s0, self._lock, self._hooks, self._repeat = s0, lock, hooks, repeat

    def run(
        self, updater: Settings, retries: RetryState, before: BatchOutcome, *, first: bool
    ) -> BatchOutcome:
        """Run forward and backward on the present inputs; if wanted, until gradients are finite. `before` is
        the outcome of the batches of this update before, if there were any.
        """
        scaling, repeats = updater.scaling, 0
        with self._lock:
            # With delay=0 every batch runs twice.
            scaling.guard.begin_batch(first=first, repeat=self._repeat or not scaling.delay)
        while True:
            with self._lock:
                report = self._forward_backward(updater, again=repeats > 0)
                settled = scaling.settled or not scaling.guard.can_undo_batch
                if settled and not report.found_inf:
                    return before
                attempt = scaling.components.attempt
                found = self._after_pass(updater, retries, before, repeats)
                if found.overflowed and not before.overflowed:
                    _tell_overflow(updater, found, attempt)
                if before.overflowed or found.bad_batch or found.at_floor:
                    return found
                if not self._repeat if found.overflowed else settled:
                    return found
                if repeats == updater.max_retries:
                    return found._replace(exhausted=found.overflowed)
                repeats += 1
                retries.repeats += 1
                if found.overflowed:
                    retries.layers, retries.component = found.nonfinite_layers, found.component
                updater.counters.count_repeat()
                if scaling.audience is not None:
                    cause = "overflow" if found.overflowed else "first measurement"
                    event = BatchRepeated(updater.iteration, attempt, cause, found.nonfinite_layers)
                    scaling.audience.tell(event)
                scaling.guard.undo_batch()

    def _after_pass(
        self, updater: Settings, retries: RetryState, before: BatchOutcome, repeats: int
    ) -> BatchOutcome:
        """The outcome of the last pass, with the scales lowered that have overflowed."""
        scaling, solver, smallest = updater.scaling, updater.solver, updater.policy.min_scale
        may_repeat = self._repeat and repeats < updater.max_retries
        lost = self._look_again(updater, before, may_repeat=may_repeat)
        # A batch that runs again with lower scales shows by that whether they were the cause.
        found = lost or examine(before, scaling, solver, smallest, search=not self._repeat)
        if before.overflowed or not found.overflowed or found.bad_batch:
            return found
        if not self._repeat:
            # What a second pass has measured is known: there is nothing to lower.
            return lost or found._replace(lowered=scaling.after_overflow())
        lowered = scaling.after_overflow() or self._s0.lower()
        # Lower scales have not helped so far: what could be wrong is looked into.
        due = repeats == (0 if retries.hopeless else _REPEATS_BEFORE_SMALLEST)
        if lost is None and (due or not lowered or repeats == updater.max_retries):
            found = find_fault(found, scaling, solver, smallest)
        if found.bad_batch:
            return found
        hopeless = not lowered or (due and not smallest_scale_helps(scaling, solver, smallest))
        return found._replace(at_floor=hopeless)

    def _forward_backward(self, updater: Settings, *, again: bool) -> PassReport:
        scaling, (forward_hooks, backward_hooks) = updater.scaling, self._hooks
        scaling.forward(clear_no_need_grad=updater.clear_buffer, **forward_hooks)
        scaling.guard.state.note_changes()
        scaling.backward(
            None if self._s0.measured else self._s0.scale,
            clear_buffer=updater.clear_buffer,
            iteration=updater.iteration,
            again=again,
            wired=True,
            **backward_hooks,
        )
        return scaling.result

    def _look_again(
        self, updater: Settings, before: BatchOutcome, *, may_repeat: bool
    ) -> Optional[BatchOutcome]:
        """Run a batch that overflowed with scales measured before it, and is not going to be repeated, once
        more with scales of its own, which name the bad layers: its outcome if it is finite now, else None.
        """
        first = updater.scaling.result
        if not (_overflows(updater) and first.held):
            return None
        if may_repeat and np.isfinite(updater.scaling.variable.d).all():
            return None
        updater.scaling.guard.undo_batch()
        self._forward_backward(updater, again=True)
        if _overflows(updater):
            return None
        layers, component = tuple(first.found_inf), first.component or ""
        return before._replace(overflowed=True, nonfinite_layers=layers, component=component, lowered=True)


def _overflows(updater: Settings) -> bool:
    return bool(updater.scaling.found_inf) and bool(updater.solver.check_inf_or_nan_grad())


def _tell_overflow(updater: Settings, found: BatchOutcome, attempt: int) -> None:
    scaling, fault = updater.scaling, "" if found.fault is None else str(found.fault)
    if scaling.audience is not None:
        cause = "nonfinite_loss" if found.nonfinite_loss else "nonfinite_forward" if fault else "overflow"
        where = found.nonfinite_layers, found.component, scaling.loss_scale
        scaling.audience.tell(Overflowed(updater.iteration, attempt, cause, *where, fault))
