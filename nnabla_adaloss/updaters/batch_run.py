# SPDX-License-Identifier: Apache-2.0
"""One batch, run forward and backward as often as it takes for its gradients to be good."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Optional, Tuple

import numpy as np

from ..engine import AdaptiveLossScaling
from ..monitor import BatchRepeated, Overflowed
from .counters import Counters
from .function_hooks import FunctionHooks
from .tries import Tries
from .window import Window, examine, smallest_scale_helps, spoil

# After so many repeats in vain of one batch it is tried with the smallest scale at once; once one was
# hopeless, the next ones at their first overflow.
_REPEATS_BEFORE_LOOKING = 3


@dataclass
class BatchRun:
    """What a batch is run with; nothing of it changes. (Frozen, it would take three times as long to make.)

    Attributes:
        scaling: runs forward and backward.
        solver: only gradients of its parameters decide about overflow.
        lock: held while parameters may be swapped for copies.
        iteration: number of the iteration.
        scale: hands out S0 as it is now; None: chosen from what was measured.
        lower_scale: lowers S0; False: it cannot go lower.
        min_scale: the smallest S0.
        repeat: whether the batch may be run again.
        max_repeats: how often.
        clear_buffer: free what is no longer needed.
        tries: where repeats of the iteration are counted.
        counters: where those of the training are.
        hooks: the user's own, around each function.
    """

    scaling: AdaptiveLossScaling
    solver: Any
    lock: Any
    iteration: int
    scale: Callable[[], Optional[float]]
    lower_scale: Callable[[], bool]
    min_scale: float
    repeat: bool
    max_repeats: int
    clear_buffer: bool
    tries: Tries
    counters: Counters
    hooks: FunctionHooks

    def run(self, window: Window, *, first: bool) -> Window:
        """Forward and backward of what was fed; again, where that is wanted, until its gradients hold.

        Args:
            window: what happened to the batches of the window before.
            first: whether there were none.
        """
        guard, repeats = self.scaling.guard, 0
        with self.lock:
            guard.begin_batch(first=first, repeat=self.repeat)
        while True:
            with self.lock:
                self._forward_backward(again=repeats > 0)
                if self._is_good:
                    return window
                attempt = self.scaling.components.began[1]
                lost = self._look_again(window) if self._is_lost(repeats) else None
                found = lost or examine(window, self.scaling, self.solver, self.min_scale)
                if self.scaling.audience is not None and found.overflowed and not window.overflowed:
                    self.scaling.audience.tell(self._overflow(found, attempt))
                if window.overflowed or self._holds(found):
                    return found
                if found.overflowed:
                    lowered = self.scaling.after_overflow() or (self.repeat and self.lower_scale())
                    if not self.repeat:
                        return found._replace(lowered=lowered)
                    if not lowered or self._is_hopeless(repeats):
                        return found._replace(at_floor=True)
                if repeats == self.max_repeats:
                    return found._replace(exhausted=found.overflowed)
                repeats += 1
                window = window.after_repeat(found)
                cause = "overflow" if found.overflowed else "first measurement"
                self._undo(cause, found.nonfinite_layers, attempt)

    def _forward_backward(self, *, again: bool) -> None:
        hooks = self.hooks
        self.scaling.forward(
            clear_no_need_grad=self.clear_buffer,
            function_pre_hook=hooks.forward_pre,
            function_post_hook=hooks.forward_post,
        )
        self.scaling.guard.after_forward()
        self.scaling.backward(
            self.scale(),
            clear_buffer=self.clear_buffer,
            function_pre_hook=hooks.backward_pre,
            function_post_hook=hooks.backward_post,
            iteration=self.iteration,
            again=again,
            wired=True,
        )

    def _undo(self, cause: str, layers: Tuple[str, ...], attempt: int) -> None:
        """Count and tell that a batch is repeated, and put back what it has changed."""
        self.tries.repeats += 1
        self.counters.repeats += 1
        if self.scaling.audience is not None:
            self.scaling.audience.tell(BatchRepeated(self.iteration, attempt, cause, layers))
        self.scaling.guard.undo_batch()

    def _look_again(self, window: Window) -> Optional[Window]:
        """Run a batch that is lost once more, because nobody has looked at single gradients.

        Args:
            window: the window before.

        Returns:
            The window after it, if the batch is finite now; None: see what it shows.
        """
        nonfinite = tuple(self.scaling.found_inf)
        self.scaling.guard.rewind()
        self._forward_backward(again=True)
        if self._overflows:
            return None
        spoil(self.solver)
        return window._replace(overflowed=True, nonfinite_layers=nonfinite, lowered=True)

    @property
    def _is_good(self) -> bool:
        """Whether nothing was found to be wrong with the batch, as nearly always."""
        scaling = self.scaling
        return not scaling.found_inf and (not self.repeat or scaling.settled)

    def _is_lost(self, repeats: int) -> bool:
        """Whether a batch has overflowed with scales that were held, and is not going to be repeated."""
        if not (self._overflows and self.scaling.held):
            return False
        loss_is_finite = bool(np.isfinite(self.scaling.variable.d).all())
        return not (self.repeat and repeats < self.max_repeats and loss_is_finite)

    @property
    def _overflows(self) -> bool:
        return bool(self.scaling.found_inf) and bool(self.solver.check_inf_or_nan_grad())

    def _overflow(self, found: Window, attempt: int) -> Overflowed:
        cause = "overflow" if found.fault is None else "nonfinite_forward"
        return Overflowed(
            self.iteration,
            attempt,
            "nonfinite_loss" if found.nonfinite_loss else cause,
            found.nonfinite_layers,
            found.layer_to_blame,
            self.scaling.loss_scale,
            "" if found.fault is None else str(found.fault),
        )

    def _holds(self, found: Window) -> bool:
        """Whether nothing is gained by running this batch again."""
        if found.overflowed:
            # Neither does a lower scale help there, nor is a single layer to be lowered on one rank alone.
            return (
                found.nonfinite_loss
                or found.fault is not None
                or (not self.repeat and found.layer_to_blame is not None)
            )
        return not self.repeat or self.scaling.settled

    def _is_hopeless(self, repeats: int) -> bool:
        """Whether no scale helps this batch; that is not looked at each time."""
        looks = repeats == (0 if self.tries.hopeless else _REPEATS_BEFORE_LOOKING)
        return looks and not smallest_scale_helps(self.scaling, self.solver, self.min_scale)
