# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of one batch, repeated until its gradients are finite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import numpy as np

from ..engine import AdaptiveLossScaling
from ..monitor import BatchRepeated, Overflowed
from .function_hooks import FunctionHooks
from .global_scale import GlobalScale
from .outcome import BatchOutcome, examine, find_fault, poison_gradients, smallest_scale_helps
from .retries import Counters, RetryState

# After this many repeats of one batch a fault in forward is looked for, and the smallest scale tried; once a
# batch was hopeless, at the first overflow of those after it.
_REPEATS_BEFORE_SMALLEST = 3


def keep_data() -> None:
    """The default data feeder: leaves the input variables as they are."""


class RunOptions(NamedTuple):
    """How batches are run.

    Attributes:
        repeat: whether a batch may be run again.
        max_repeats: how often.
        clear_buffer: free activations and gradients that are no longer needed.
        hooks: the user's own hooks, around each function.
    """

    repeat: bool
    max_repeats: int
    clear_buffer: bool
    hooks: FunctionHooks


@dataclass
class BatchRun:
    """One batch and what it is run with. (Frozen, it would take three times as long to make.)

    Attributes:
        scaling: runs forward and backward.
        solver: only gradients of its parameters count as overflow.
        lock: held while parameters may be swapped for copies.
        global_scale: S0.
        retries: the retries of the iteration.
        counters: the batches of the training.
        options: how it is run.
    """

    scaling: AdaptiveLossScaling
    solver: Any
    lock: Any
    global_scale: GlobalScale
    retries: RetryState
    counters: Counters
    options: RunOptions

    def run(self, before: BatchOutcome, *, first: bool) -> BatchOutcome:
        """Run forward and backward on the present inputs; if wanted, until gradients are finite.

        Args:
            before: the outcome of the batches of this update before.
            first: whether there were none.
        """
        guard, repeats, repeat = self.scaling.guard, 0, self.options.repeat
        with self.lock:
            guard.begin_batch(first=first, repeat=repeat)
        while True:
            with self.lock:
                self._forward_backward(again=repeats > 0)
                if self._is_good:
                    return before
                # A batch that is searched for its gradients runs again in any case.
                repeat = self.options.repeat or self.scaling.components.searching
                attempt = self.scaling.components.began[1]
                lost = self._run_again(before) if self._is_lost(repeats) else None
                # A batch that runs again with lower scales shows by that whether they were the cause.
                found = lost or self._examined(before, search=not repeat)
                lowered = False
                if repeat and found.overflowed and not (before.overflowed or found.bad_batch):
                    lowered = self.scaling.after_overflow() or self.global_scale.lower()
                    last = not lowered or repeats == self.options.max_repeats
                    if lost is None and (last or self._is_due(repeats)):
                        found = find_fault(found, self.scaling, self.solver, self._min_scale)
                if found.overflowed and not before.overflowed:
                    self._notify_overflow(found, attempt)
                if before.overflowed or self._is_final(found):
                    return found
                if found.overflowed:
                    if not repeat:
                        # What a second pass has measured is known: there is nothing to lower.
                        return lost or found._replace(lowered=self.scaling.after_overflow())
                    if not lowered or (self._is_due(repeats) and not self._smallest_scale_helps()):
                        return found._replace(at_floor=True)
                if repeats == self.options.max_repeats:
                    return found._replace(exhausted=found.overflowed)
                repeats += 1
                before = before.after_repeat(found)
                self._begin_repeat(found, attempt)

    @property
    def _min_scale(self) -> float:
        return self.global_scale.policy.min_scale

    def _forward_backward(self, *, again: bool) -> None:
        hooks, clear_buffer = self.options.hooks, self.options.clear_buffer
        self.scaling.forward(
            clear_no_need_grad=clear_buffer,
            function_pre_hook=hooks.forward_pre,
            function_post_hook=hooks.forward_post,
        )
        self.scaling.guard.after_forward()
        self.scaling.backward(
            self.global_scale.seed,
            clear_buffer=clear_buffer,
            function_pre_hook=hooks.backward_pre,
            function_post_hook=hooks.backward_post,
            iteration=self.retries.iteration,
            again=again,
            wired=True,
        )

    def _begin_repeat(self, found: BatchOutcome, attempt: int) -> None:
        """Count and report that the batch is repeated, and undo it."""
        self.retries.count_repeat()
        self.counters.count_repeat()
        if self.scaling.audience is not None:
            cause = "overflow" if found.overflowed else "first measurement"
            event = BatchRepeated(self.retries.iteration, attempt, cause, found.nonfinite_layers)
            self.scaling.audience.tell(event)
        self.scaling.guard.undo_batch()

    def _run_again(self, before: BatchOutcome) -> Optional[BatchOutcome]:
        """Run a lost batch once more with measured scales, which name the bad layers.

        The result is its outcome if it is finite now; None if it still has to be examined.
        """
        nonfinite = tuple(self.scaling.found_inf)
        self.scaling.guard.undo_batch()
        self._forward_backward(again=True)
        if self._overflows:
            return None
        poison_gradients(self.solver)
        return before._replace(overflowed=True, nonfinite_layers=nonfinite, lowered=True)

    @property
    def _is_good(self) -> bool:
        """True when nothing is wrong with the batch, as nearly always."""
        scaling = self.scaling
        return not scaling.found_inf and (
            scaling.settled or not (self.options.repeat or scaling.components.searching)
        )

    def _is_lost(self, repeats: int) -> bool:
        """True when a batch overflowed with scales measured before it, and is not going to be repeated."""
        if not (self._overflows and self.scaling.held):
            return False
        loss_is_finite = bool(np.isfinite(self.scaling.variable.d).all())
        return not (self.options.repeat and repeats < self.options.max_repeats and loss_is_finite)

    @property
    def _overflows(self) -> bool:
        return bool(self.scaling.found_inf) and bool(self.solver.check_inf_or_nan_grad())

    def _notify_overflow(self, found: BatchOutcome, attempt: int) -> None:
        if self.scaling.audience is None:
            return
        cause = "overflow" if found.fault is None else "nonfinite_forward"
        event = Overflowed(
            self.retries.iteration,
            attempt,
            "nonfinite_loss" if found.nonfinite_loss else cause,
            found.nonfinite_layers,
            found.layer_to_blame,
            self.scaling.loss_scale,
            "" if found.fault is None else str(found.fault),
        )
        self.scaling.audience.tell(event)

    def _is_final(self, found: BatchOutcome) -> bool:
        """True when nothing is gained by running this batch again."""
        if found.overflowed:
            # No scale helps a bad batch, and a single layer must not be lowered on one rank alone.
            return found.bad_batch or (not self.options.repeat and found.layer_to_blame is not None)
        return self.scaling.settled or not (self.options.repeat or self.scaling.components.searching)

    def _examined(self, before: BatchOutcome, *, search: bool) -> BatchOutcome:
        return examine(before, self.scaling, self.solver, self._min_scale, search=search)

    def _is_due(self, repeats: int) -> bool:
        """True when lower scales have not helped so far, and what could be wrong is looked into."""
        return repeats == (0 if self.retries.hopeless else _REPEATS_BEFORE_SMALLEST)

    def _smallest_scale_helps(self) -> bool:
        return smallest_scale_helps(self.scaling, self.solver, self._min_scale)
