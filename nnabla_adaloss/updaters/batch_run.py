# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of the batches of an updater, and what monitors are told of them."""

from __future__ import annotations

from typing import Any, Callable

from ..core.verdict import CHECK_AFTER, Rules, Verdict
from ..engine import BatchLoop, Outcome
from ..monitor import BatchRepeated, Overflowed
from .global_scale import GlobalScale
from .settings import PassHooks, Settings


class BatchRunner:
    """Runs the batches of an updater, whose settings and engine are those of the moment. `lock` is held while
    parameters are swapped; `repeat` says whether a batch that overflows runs again, before which `on_repeat`
    is called.
    """

    def __init__(
        self,
        s0: GlobalScale,
        lock: Any,
        hooks: PassHooks,
        on_repeat: Callable[[Outcome], Any],
        *,
        repeat: bool,
    ) -> None:
        self._s0, self._lock, self._hooks, self._repeat = s0, lock, hooks, repeat
        self._on_repeat = on_repeat

    def run(self, updater: Settings, before: Outcome, *, first: bool, suspicious: bool) -> Outcome:
        """Run forward and backward on the present inputs; if wanted, until gradients are finite. `before` is
        the outcome of the batches of this update before; `suspicious`: at the first overflow it is looked
        into whether any scale helps.
        """
        scaling = updater.scaling
        with self._lock:
            # With delay=0 every batch runs twice.
            scaling.guard.begin_batch(first=first, repeat=self._repeat or not scaling.delay)
            self._forward_backward(updater, again=False)
            # Nearly always.
            if scaling.is_good:
                return before
            rules = Rules(
                self._repeat, updater.max_retries, 0 if suspicious else CHECK_AFTER, before.overflowed
            )
            return _together(before, self._loop(updater, before).go_on(rules))

    def _loop(self, updater: Settings, before: Outcome) -> BatchLoop:
        def on_repeat(found: Outcome) -> None:
            found = _together(before, found)
            self._on_repeat(found)
            if updater.scaling.audience is not None:
                cause = "overflow" if found.overflowed else "first measurement"
                event = BatchRepeated(updater.iteration, found.attempt, cause, found.layers)
                updater.scaling.audience.tell(event)

        return BatchLoop(
            updater.scaling,
            lambda again: self._forward_backward(updater, again=again),
            lambda: updater.solver.get_parameters().values(),
            updater.policy.min_scale,
            lambda: self._repeat and self._s0.lower(),
            lambda found: _tell_overflow(updater, _together(before, found)),
            on_repeat,
        )

    def _forward_backward(self, updater: Settings, *, again: bool) -> None:
        scaling, (forward_hooks, backward_hooks) = updater.scaling, self._hooks
        scaling.forward(clear_no_need_grad=updater.clear_buffer, **forward_hooks)
        scaling.backward(
            None if self._s0.measured else self._s0.scale,
            clear_buffer=updater.clear_buffer,
            iteration=updater.iteration,
            again=again,
            wired=True,
            **backward_hooks,
        )


def _together(before: Outcome, found: Outcome) -> Outcome:
    """The outcome of some batches and one more: the first overflow, and all layers that were not finite."""
    layers = tuple(dict.fromkeys((*before.layers, *found.layers)))
    return (before if before.overflowed else found)._replace(layers=layers)


def _tell_overflow(updater: Settings, found: Outcome) -> None:
    scaling, fault = updater.scaling, "" if found.fault is None else str(found.fault)
    if scaling.audience is not None:
        loss = found.verdict is Verdict.NONFINITE_LOSS
        cause = "nonfinite_loss" if loss else "nonfinite_forward" if fault else "overflow"
        where = found.layers, found.component, scaling.loss_scale
        event = Overflowed(updater.iteration, found.attempt, cause, *where, fault)
        scaling.audience.tell(event)
