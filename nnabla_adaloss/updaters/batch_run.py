# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of one batch, repeated until its gradients are finite."""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import numpy as np

from ..engine.report import PassReport
from ..monitor import BatchRepeated, Overflowed
from .idle import Idle
from .outcome import BatchOutcome, examine, find_fault, judge, poison_gradients, smallest_scale_helps
from .retries import Counters, RetryState
from .settings import Settings

# After this many repeats of one batch a fault in forward is looked for, and the smallest scale tried; once a
# batch was hopeless, at the first overflow of those after it.
_REPEATS_BEFORE_SMALLEST = 3


def keep_data() -> None:
    """The default data feeder: leaves the input variables as they are."""


class BatchRuns(Settings):
    """An updater's way to run forward and backward of one batch."""

    _retries: RetryState
    _idle: Idle
    _repeat: bool
    _hooks: Tuple[Dict[str, Any], Dict[str, Any]]
    counters: Counters

    def _run_batch(self, before: BatchOutcome, *, first: bool) -> BatchOutcome:
        """Run forward and backward on the present inputs; if wanted, until gradients are finite. `before` is
        the outcome of the batches of this update before, if there were any.
        """
        scaling, repeats = self.scaling, 0
        with self._idle.lock:
            # With delay=0 every batch runs twice.
            scaling.guard.begin_batch(first=first, repeat=self._repeat or not scaling.delay)
        while True:
            with self._idle.lock:
                report = self._forward_backward(again=repeats > 0)
                settled = scaling.settled or not scaling.guard.can_undo_batch
                if settled and not report.found_inf:
                    return before
                attempt = scaling.components.began[1]
                found = self._after_pass(before, repeats)
                if found.overflowed and not before.overflowed:
                    self._notify_overflow(found, attempt)
                verdict = judge(found, settled=settled)
                if before.overflowed or verdict in ("good", "fault") or found.at_floor:
                    return found
                if verdict == "overflow" and not self._repeats:
                    return found
                if repeats == self.max_retries:
                    return found._replace(exhausted=found.overflowed)
                repeats += 1
                before = before.after_repeat(found)
                self._begin_repeat(found, attempt)

    @property
    def _repeats(self) -> bool:
        """Whether a batch that overflows runs again; one that is searched for its gradients does anyway."""
        return self._repeat or self.scaling.components.searching

    def _after_pass(self, before: BatchOutcome, repeats: int) -> BatchOutcome:
        """The outcome of the last pass, with the scales lowered that have overflowed."""
        repeat, smallest = self._repeats, self.policy.min_scale
        lost = self._run_again(before) if self._is_lost(repeats) else None
        # A batch that runs again with lower scales shows by that whether they were the cause.
        found = lost or examine(before, self.scaling, self.solver, smallest, search=not repeat)
        if before.overflowed or judge(found) != "overflow":
            return found
        if not repeat:
            # What a second pass has measured is known: there is nothing to lower.
            return lost or found._replace(lowered=self.scaling.after_overflow())
        lowered = self.scaling.after_overflow() or self._s0.lower()
        # Lower scales have not helped so far: what could be wrong is looked into.
        due = repeats == (0 if self._retries.hopeless else _REPEATS_BEFORE_SMALLEST)
        if lost is None and (due or not lowered or repeats == self.max_retries):
            found = find_fault(found, self.scaling, self.solver, smallest)
        if judge(found) == "fault":
            return found
        hopeless = not lowered or (due and not smallest_scale_helps(self.scaling, self.solver, smallest))
        return found._replace(at_floor=hopeless)

    def _forward_backward(self, *, again: bool) -> PassReport:
        (forward_hooks, backward_hooks), clear_buffer = self._hooks, self.clear_buffer
        self.scaling.forward(clear_no_need_grad=clear_buffer, **forward_hooks)
        self.scaling.guard.state.note_changes()
        self.scaling.backward(
            self._s0.seed,
            clear_buffer=clear_buffer,
            iteration=self.iteration,
            again=again,
            wired=True,
            **backward_hooks,
        )
        return self.scaling.result

    def _begin_repeat(self, found: BatchOutcome, attempt: int) -> None:
        """Count and report that the batch is repeated, and undo it."""
        self._retries.repeats += 1
        self.counters.count_repeat()
        if self.scaling.audience is not None:
            cause = "overflow" if found.overflowed else "first measurement"
            event = BatchRepeated(self.iteration, attempt, cause, found.nonfinite_layers)
            self.scaling.audience.tell(event)
        self.scaling.guard.undo_batch()

    def _run_again(self, before: BatchOutcome) -> Optional[BatchOutcome]:
        """Run a lost batch once more with measured scales, which name the bad layers.

        The result is its outcome if it is finite now; None if it still has to be examined.
        """
        first = self.scaling.result
        self.scaling.guard.undo_batch()
        self._forward_backward(again=True)
        if self._overflows:
            return None
        poison_gradients(self.solver)
        return before._replace(
            overflowed=True,
            nonfinite_layers=tuple(first.found_inf),
            component=first.component or "",
            lowered=True,
        )

    def _is_lost(self, repeats: int) -> bool:
        """True when a batch overflowed with scales measured before it, and is not going to be repeated."""
        if not (self._overflows and self.scaling.result.held):
            return False
        loss_is_finite = bool(np.isfinite(self.scaling.variable.d).all())
        return not (self._repeat and repeats < self.max_retries and loss_is_finite)

    @property
    def _overflows(self) -> bool:
        return bool(self.scaling.found_inf) and bool(self.solver.check_inf_or_nan_grad())

    def _notify_overflow(self, found: BatchOutcome, attempt: int) -> None:
        if self.scaling.audience is None:
            return
        cause = "overflow" if found.fault is None else "nonfinite_forward"
        event = Overflowed(
            self.iteration,
            attempt,
            "nonfinite_loss" if found.nonfinite_loss else cause,
            found.nonfinite_layers,
            found.component,
            self.scaling.loss_scale,
            "" if found.fault is None else str(found.fault),
        )
        self.scaling.audience.tell(event)
