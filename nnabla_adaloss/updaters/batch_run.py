# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of one batch, repeated until its gradients are finite."""

from __future__ import annotations

from typing import Any, Optional

import numpy as np

from ..engine import AdaptiveLossScaling
from ..engine.report import PassReport
from ..monitor import BatchRepeated, Overflowed
from .global_scale import GlobalScale
from .outcome import BatchOutcome, examine, find_fault, judge, poison_gradients, smallest_scale_helps
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
                attempt = scaling.components.began[1]
                found = self._after_pass(updater, retries, before, repeats)
                if found.overflowed and not before.overflowed:
                    _notify_overflow(scaling, updater.iteration, found, attempt)
                verdict = judge(found, settled=settled)
                if before.overflowed or verdict in ("good", "fault") or found.at_floor:
                    return found
                if verdict == "overflow" and not self._repeats(scaling):
                    return found
                if repeats == updater.max_retries:
                    return found._replace(exhausted=found.overflowed)
                repeats += 1
                before = before.after_repeat(found)
                _begin_repeat(updater, retries, found, attempt)

    def _repeats(self, scaling: AdaptiveLossScaling) -> bool:
        """Whether a batch that overflows runs again; one that is searched for its gradients does anyway."""
        return self._repeat or scaling.components.searching

    def _after_pass(
        self, updater: Settings, retries: RetryState, before: BatchOutcome, repeats: int
    ) -> BatchOutcome:
        """The outcome of the last pass, with the scales lowered that have overflowed."""
        scaling, solver, smallest = updater.scaling, updater.solver, updater.policy.min_scale
        repeat, may_repeat = self._repeats(scaling), self._repeat and repeats < updater.max_retries
        lost = self._run_again(updater, before) if _is_lost(updater, may_repeat=may_repeat) else None
        # A batch that runs again with lower scales shows by that whether they were the cause.
        found = lost or examine(before, scaling, solver, smallest, search=not repeat)
        if before.overflowed or judge(found) != "overflow":
            return found
        if not repeat:
            # What a second pass has measured is known: there is nothing to lower.
            return lost or found._replace(lowered=scaling.after_overflow())
        lowered = scaling.after_overflow() or self._s0.lower()
        # Lower scales have not helped so far: what could be wrong is looked into.
        due = repeats == (0 if retries.hopeless else _REPEATS_BEFORE_SMALLEST)
        if lost is None and (due or not lowered or repeats == updater.max_retries):
            found = find_fault(found, scaling, solver, smallest)
        if judge(found) == "fault":
            return found
        hopeless = not lowered or (due and not smallest_scale_helps(scaling, solver, smallest))
        return found._replace(at_floor=hopeless)

    def _forward_backward(self, updater: Settings, *, again: bool) -> PassReport:
        scaling, (forward_hooks, backward_hooks) = updater.scaling, self._hooks
        scaling.forward(clear_no_need_grad=updater.clear_buffer, **forward_hooks)
        scaling.guard.state.note_changes()
        scaling.backward(
            self._s0.seed,
            clear_buffer=updater.clear_buffer,
            iteration=updater.iteration,
            again=again,
            wired=True,
            **backward_hooks,
        )
        return scaling.result

    def _run_again(self, updater: Settings, before: BatchOutcome) -> Optional[BatchOutcome]:
        """Run a lost batch once more with measured scales, which name the bad layers: its outcome if it is
        finite now; None if it still has to be examined.
        """
        first = updater.scaling.result
        updater.scaling.guard.undo_batch()
        self._forward_backward(updater, again=True)
        if _overflows(updater):
            return None
        poison_gradients(updater.solver)
        return before._replace(
            overflowed=True,
            nonfinite_layers=tuple(first.found_inf),
            component=first.component or "",
            lowered=True,
        )


def _begin_repeat(updater: Settings, retries: RetryState, found: BatchOutcome, attempt: int) -> None:
    """Count and report that the batch is repeated, and undo it."""
    scaling = updater.scaling
    retries.repeats += 1
    updater.counters.count_repeat()
    if scaling.audience is not None:
        cause = "overflow" if found.overflowed else "first measurement"
        scaling.audience.tell(BatchRepeated(updater.iteration, attempt, cause, found.nonfinite_layers))
    scaling.guard.undo_batch()


def _is_lost(updater: Settings, *, may_repeat: bool) -> bool:
    """True when a batch overflowed with scales measured before it, and is not going to be repeated."""
    if not (_overflows(updater) and updater.scaling.result.held):
        return False
    return not (may_repeat and np.isfinite(updater.scaling.variable.d).all())


def _overflows(updater: Settings) -> bool:
    return bool(updater.scaling.found_inf) and bool(updater.solver.check_inf_or_nan_grad())


def _notify_overflow(scaling: AdaptiveLossScaling, iteration: int, found: BatchOutcome, attempt: int) -> None:
    if scaling.audience is None:
        return
    cause = "overflow" if found.fault is None else "nonfinite_forward"
    event = Overflowed(
        iteration,
        attempt,
        "nonfinite_loss" if found.nonfinite_loss else cause,
        found.nonfinite_layers,
        found.component,
        scaling.loss_scale,
        "" if found.fault is None else str(found.fault),
    )
    scaling.audience.tell(event)
