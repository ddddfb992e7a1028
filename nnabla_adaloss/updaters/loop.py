# SPDX-License-Identifier: Apache-2.0
"""Loop of an updater: an iteration feeds, runs, repeats, loses or uses its batches, or is undone."""

from __future__ import annotations

import math
from collections import deque
from contextlib import contextmanager
from functools import partial
from itertools import chain
from operator import methodcaller
from typing import Any, Callable, Iterator, List, Mapping, Optional, Tuple

import numpy as np
from nnabla.experimental.mixed_precision_training import DynamicLossScalingUpdater

from ..core.config import AdaLossConfig
from ..core.scale_policy import ScalePolicy, ScaleState
from ..core.verdict import CHECK_AFTER, PassVerdict, Rules
from ..emulation.format_emulation import with_storage
from ..engine import AdaptiveLossScaling, BatchLoop, Outcome
from ..errors import LossScaleError
from ..graph.graph import Graph
from ..graph.loss import REDUCE, LossLike, check_scale
from ..monitor.audience import audience_of
from ..monitor.events import BatchRepeated, BatchThrownAway, Overflowed, ScaleChanged, UpdateEnded
from ..undo.snapshot import savepoint
from .exchange import GradientExchange
from .global_scale import GlobalScale
from .idle import idle_of
from .notifications import ANALYSE, Notifier, notify_training_began
from .retries import Counters, RetryState, UpdateResult
from .settings import POLICY_FIELDS, history_of, hooks_by_pass
from .solvers import make_memory, parameters_of

_CALL = methodcaller("__call__")

# This many batches in a row that overflow at any scale are not caused by single batches. nnabla's updater
# would have halved its scale as often, until no gradient is left.
_HOPELESS = 25


class TrainingLoop(DynamicLossScalingUpdater):  # type: ignore[misc]
    """Trains on the batches of a loss, with the arguments of an updater as attributes."""

    undone = ("iteration",)  # restored from a `savepoint`
    drop_overflow_update: Any = True  # an argument of `FixedLossScalingUpdater`

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        # A docstring would be the one that help() shows of the public updaters' `__init__`.
        scale, comm = check_scale(arguments["scale"]), arguments["comm"]
        self._hooks = hooks_by_pass(arguments["function_pre_hook"], arguments["function_post_hook"])
        history = history_of(arguments["global_scale"], scale, arguments["min_scale"])
        policy = ScalePolicy(**{name: arguments[name] for name in POLICY_FIELDS})
        self._s0 = GlobalScale(scale, policy, history)
        self.solver = arguments["solver"]
        self._exchange = GradientExchange(comm, arguments["grads"], self.solver)
        self._audience = audience_of(arguments["monitors"])
        made = {"history": history, "grads": [] if comm is None else self._exchange.grads}
        # All arguments become attributes, checked by the `Setting` of each.
        for name, value in {**arguments, **made}.items():
            if name not in ("self", "loss", "scale"):
                setattr(self, name, value)
        self.counters, self._notifier = Counters(), Notifier()
        self._repeat = self.on_overflow == "repeat"
        # True if S0 is searched for as by nnabla's updater: no repeats, an overflow lowers S0 on all ranks.
        self._searches = not (self._repeat or self._s0.measured)
        self.iteration = 0
        # Set until an exchange with other ranks: if an exception comes first, the next call resumes it.
        self._interrupted: Optional[RetryState] = None
        self._undone: List[Tuple[Callable[[], None], AdaptiveLossScaling]] = []  # savepoint of an iteration
        # Last, because it may replace functions of the graph: all other arguments are valid by now.
        self._loss: LossLike = arguments["loss"]
        self.scaling = self._engine(self._loss, self.config)
        used = chain(Graph(self.scaling.variable).leaves.values(), parameters_of([self.solver]))
        self._idle = idle_of(frozenset({id(self.solver), *(hash(v.data) for v in used)}))

    def _engine(self, loss: LossLike, config: Optional[AdaLossConfig]) -> AdaptiveLossScaling:
        """Make the engine of a loss."""
        common: Any = {"parameters": self.solver.get_parameters, "float_tail": self.float_tail}
        wrapped, monitors = with_storage(loss, self.storage, **common), self._audience or ()
        scaling = AdaptiveLossScaling(wrapped, config, history=self.history, monitors=monitors, **common)
        if scaling.variable.size != 1:
            raise ValueError(f"loss has shape {scaling.variable.shape}, not one element; {REDUCE}")
        return scaling

    @property
    def loss(self) -> LossLike:
        """The trained loss; assign another for a graph that changes between iterations."""
        return self._loss

    @loss.setter
    def loss(self, loss: LossLike) -> None:
        if loss is self._loss:
            return
        # Completing a configuration takes longer than reading a small graph.
        scaling = self._engine(loss, self.scaling.config)
        scaling.go_on_from(self.scaling)
        self._loss, self.scaling = loss, scaling

    @property
    def scale(self) -> float:
        """S0, the global loss scale; may be set between updates.

        With `global_scale="history"`: that of the last update. One assigned only starts a new measurement.
        """
        return self._s0.state.scale

    @scale.setter
    def scale(self, value: float) -> None:
        self._idle.when_idle(self._undo_iteration)  # a rollback that was interrupted would undo this, too
        self._s0.state = self.scale_state._replace(scale=check_scale(value))
        if self._s0.measured:
            self.scaling.restart(self.scale)

    @property
    def scale_state(self) -> ScaleState:
        """The global loss scale with its counters, as `global_scale="dynamic"` uses them."""
        return self._s0.state

    @contextmanager
    def _between_updates(self, caller: str) -> Iterator[None]:
        """Keep out updates of any thread; RuntimeError, which names `caller`, if one is running."""
        with self._idle.between_updates(caller):
            self._undo_iteration()  # finish a rollback that was itself interrupted
            yield

    def _update(self) -> UpdateResult:
        """Run an iteration, undo it if it raises, and notify monitors of its end."""
        self._undo_iteration()  # finish a rollback that was itself interrupted
        before = self._s0.state
        self._retries = self._interrupted or RetryState(before)
        self.scaling.guard.begin()
        # Other ranks would not go back: with several, an iteration is undone only before the exchange.
        if self.comm is None:
            own: List[Any] = [self, self._s0, self.counters, self._notifier]
            self._undone.append((savepoint(own + self.scaling.undoable), self.scaling))
        try:
            result = self._run_iteration()
        except BaseException:
            if self._interrupted is not None:
                # Other ranks wait for this one in the same attempt of the same iteration.
                self.iteration -= 1
                self.counters.fed = self._retries.fed
                self._undo_batches()
            self._undo_iteration()
            raise
        if self._audience is not None:
            if self.scale != before.scale:
                self._audience.tell(ScaleChanged(self.iteration, before.scale, self.scale))
            # Reading the loss waits for a GPU.
            if self._audience.wants(UpdateEnded, self.iteration):
                loss = float(self.scaling.variable.d.flat[0])
                kind = result.updated, result.reason, result.scale, result.retries
                self._audience.tell(UpdateEnded(self.iteration, *kind, loss))
        return result

    def _run_iteration(self) -> UpdateResult:
        """Run batches until their gradients are finite on all ranks, or must be skipped, and update."""
        resumed, self._interrupted = self._interrupted, None
        if not self.iteration:
            self._notifier.check_parameters(self.solver, self.scaling.graph, self.scaling.plan)
            trained = self.scaling.graph.by_key(self.scaling.plan.leaves).values()
            make_memory(self.solver, trained, self.scaling.kernels.context)
        shared = self.comm is not None
        compares = shared and self._exchange.begin_iteration(self.iteration + 1, self.check_every)
        self.iteration += 1
        if self._audience is not None and not self._audience.training_began:
            notify_training_began(self._audience, self.iteration, self)
        if compares and resumed is None:
            # Scales that must be equal on all ranks; all have compared them before an iteration is resumed.
            unit_amaxes = [amax for _, amax in sorted(self.scaling.components.unit_amaxes().items())]
            self._exchange.check_ranks_agree([self.scale, *unit_amaxes], self.iteration)
        while True:
            self._interrupted = self._retries if shared else None
            outcome = self._run_batches()
            used, overflowed = self.scaling.loss_scale, outcome.facts.overflowed
            if shared:
                # Sums the gradients over all ranks, too.
                used, overflowed = self._s0.exchange(
                    self._exchange, self.scaling, average=self.average, alike=self._searches, bad=overflowed
                )
                self._interrupted = None
            if not (overflowed and self.drop_overflow_update):
                break
            skipped = self._lose_batches(outcome)
            if skipped is not None:
                return skipped
        # The gradients are complete, unscaled, and equal on all ranks.
        retries, last = self._retries, self._retries.last
        learns = self._notifier.note_update(self.iteration, self.scale, [self.scaling], [self.solver])
        if not self.scaling.result.state_finite:
            # Infinite running statistics would outlast the batch, whose gradients are finite.
            self._undo_batches()
        if self.average and self.accum_grad > 1:
            self.solver.scale_grad(1.0 / self.accum_grad)
        if self.on_gradients is not None:
            self.on_gradients(self.solver)
        if self.weight_decay is not None:
            self.solver.weight_decay(self.weight_decay)
        # With repeats, S0 has only changed if a batch overflowed and ran again: hysteresis is not refilled.
        ran_again = self._repeat and self._s0.state != retries.scale_state
        self._s0.after_update(used, overflowed=ran_again)
        self.counters.count_update(self.accum_grad)
        with self._idle.lock:
            # Update parameters in one call into C that runs no line of Python: no signal can come between the
            # step and the end of the iteration, with which it counts.
            self.scaling.after_update(partial(deque, map(_CALL, (self.solver.update, self._undone.clear)), 0))
        reason = "updated" if learns else "zero_gradients"
        return UpdateResult(
            True, self.scale, retries.retries, reason, last.layers, outcome.layers, component=last.component
        )

    def _run_batches(self) -> Outcome:
        """Zero the gradients, then feed, run forward and backward `accum_grad` times."""
        outcome = Outcome()
        self._retries.fed = self.counters.fed
        self.solver.zero_grad()
        for index in range(self.accum_grad):
            # The feeder may assign another loss, and rewire this one.
            self.data_feeder()
            self.counters.fed += 1
            scaling = self.scaling
            with self._idle.lock:
                # Every batch runs twice with delay=0.
                scaling.guard.begin_batch(first=not index, repeat=self._repeat or not scaling.delay)
                self._run_pass(rerun=False)
                # Rare: an overflow, or the first measurement.
                if not scaling.is_good:
                    # After a hopeless batch, `judge` tries at the first overflow whether any scale helps.
                    check_after = 0 if self._retries.hopeless else CHECK_AFTER
                    rules = Rules(self._repeat, self.max_retries, check_after, outcome.facts.overflowed)
                    now = self._batch_loop().go_on(rules)
                    # The first overflow, if any, and its layers before others that were not finite.
                    first, other = (outcome, now) if outcome.facts.overflowed else (now, outcome)
                    outcome = first._replace(layers=tuple(dict.fromkeys(first.layers + other.layers)))
        return outcome

    def _run_pass(self, rerun: bool) -> None:
        """Run forward and backward on the present inputs; `rerun`: the same batch once more."""
        forward_hooks, backward_hooks = self._hooks
        self.scaling.forward(clear_no_need_grad=self.clear_buffer, **forward_hooks)
        self.scaling.backward(
            None if self._s0.measured else self._s0.state.scale,
            clear_buffer=self.clear_buffer,
            iteration=self.iteration,
            rerun=rerun,
            graph_unchanged=True,
            **backward_hooks,
        )

    def _batch_loop(self) -> BatchLoop:
        """Make the loop over the passes of a batch."""
        s0 = self._s0.state

        def on_overflow(outcome: Outcome) -> None:
            # S0 goes down once per batch, for any number of repeats; scales of components, in each.
            if self._repeat and self._s0.state is s0:
                self._s0.lower()
            if self._audience is not None:
                cause = outcome.verdict.value if outcome.verdict.of_forward else "overflow"
                where = outcome.layers, outcome.component, self.scaling.loss_scale, outcome.fault
                self._audience.tell(Overflowed(self.iteration, outcome.attempt, cause, *where))

        def on_repeat(outcome: Outcome) -> None:
            self._retries.repeats += 1
            self.counters.repeats += 1
            if outcome.facts.overflowed:
                self._retries.last = outcome
            if self._audience is not None:
                cause = "overflow" if outcome.facts.overflowed else "first measurement"
                self._audience.tell(BatchRepeated(self.iteration, outcome.attempt, cause, outcome.layers))

        return BatchLoop(
            scaling=self.scaling,
            run_pass=self._run_pass,
            parameters=lambda: parameters_of([self.solver]),
            smallest_scale=self.min_scale,
            lower=lambda: self._repeat and self._s0.lower(),
            on_overflow=on_overflow,
            on_repeat=on_repeat,
        )

    def _lose_batches(self, outcome: Outcome) -> Optional[UpdateResult]:
        """Undo the batches of this attempt; return the result of the iteration if it ends with them."""
        retries = self._retries
        self._undo_batches()
        verdict, lowered = self._exchange.agree(outcome, repeat=self._repeat)
        retries.last = outcome
        if self._searches and verdict is PassVerdict.HOPELESS:
            # As with nnabla's updater, S0 decreases with every lost batch, until it cannot.
            verdict = PassVerdict.OVERFLOW
        # S0 stays if no lower scale helps, or one was lowered already. If all are at their floor, none helps.
        explained = verdict.lowers_nothing or (self._repeat and lowered)
        if not explained and not self._s0.lower() and not lowered:
            verdict = PassVerdict.HOPELESS
        self._count_lost(verdict, outcome)
        if verdict.of_forward:
            return self._skip_bad_batch(outcome, verdict)
        if verdict is PassVerdict.HOPELESS:
            retries.hopeless += 1
            # One such batch is thrown away; many, or one beyond the allowed retries, end the iteration.
            no_retry_left = self._repeat and retries.discarded == self.max_retries
            if self._searches or no_retry_left or retries.hopeless == _HOPELESS:
                return self._skip_at_floor(outcome)
            # No scale helps this batch: restore the earlier scales.
            self._drop_batches()
            self._notifier.warn(
                "hopeless",
                f"gradients of a batch in iteration {self.iteration} are not finite at any loss scale: "
                f"it is thrown away; first bad layer: {outcome.where}",
            )
            cause = f"no loss scale makes its gradients finite; first bad layer: {outcome.where}"
            self._notifier.note_lost_batch(self.iteration, cause)
        else:
            self._notifier.note_overflow(self.iteration, outcome.where)
        retries.discarded += 1
        self.scaling.components = self.scaling.components.after_lost_batch()
        self.scaling.guard.begin()
        if verdict is not PassVerdict.RETRIES and retries.discarded <= self.max_retries:
            return None
        self.scaling.end_iteration()
        message = (
            f"gradients overflowed {retries.retries} times in iteration {self.iteration}, with ever "
            f"lower scales; first bad layer: {outcome.where}"
        )
        policy = self.on_scale_floor if self._repeat and self.max_retries else "skip"
        return self._skipped(policy, "overflow", "retries", message)

    def _count_lost(self, verdict: PassVerdict, outcome: Outcome) -> None:
        """Count the batches of this attempt as lost, and report them to monitors."""
        self.counters.count_lost(verdict.value, self.accum_grad)
        if self._audience is not None:
            extra = verdict.value, outcome.layers, self.accum_grad, outcome.fault
            self._audience.tell(BatchThrownAway(self.iteration, *extra))

    def _undo_batches(self) -> None:
        """Restore the leaves that forward has written since the update began, in all graphs."""
        with self._idle.lock:
            self.scaling.guard.state.restore()

    def _undo_iteration(self) -> None:
        """Undo an iteration that did not end; do nothing after one that did."""
        # The order is arrays, attributes, graphs. All of it can run twice: it may be interrupted, too.
        for restore, scaling in self._undone:
            with self._idle.lock:
                self.scaling.guard.undo_window()
            restore()
            self.scaling.go_back_to(scaling)
        self._undone.clear()

    def _restore_scales(self) -> None:
        """Restore the scales of the iteration's start, and drop its measurements."""
        self._s0.state = self._retries.scale_state
        self.scaling.drop_iteration()

    def _drop_batches(self) -> None:
        """Restore the scales of this attempt's start, and drop its measurements."""
        if self._repeat:
            # Lower scales were tried without success.
            self._s0.state = self._retries.scale_state
        self.scaling.components = self.scaling.components.without_batch()

    def _skip_bad_batch(self, outcome: Outcome, verdict: PassVerdict) -> UpdateResult:
        """End the iteration after a batch whose forward is not finite, on this rank or another."""
        self._drop_batches()
        place = "the loss" if verdict is PassVerdict.NONFINITE_LOSS else "the forward pass"
        if self.comm is not None:
            place += " of this rank" if outcome.verdict is verdict else " of another rank"
        cause, fault, policy = verdict.value, outcome.fault, getattr(self, f"on_{verdict.value}")
        message = (
            f"{place} is not finite in iteration {self.iteration}{': ' if fault else ''}{fault}; this is not "
            f"a gradient overflow, so the loss scale stays at {self.scale:g}. Check the data and the "
            f'learning rate, and {ANALYSE}; on_{cause}="skip" leaves such batches out'
        )
        # Whoever chose "skip" expects such batches.
        if policy == "warn":
            self._notifier.note_lost_batch(self.iteration, f"forward is not finite: {fault or place}")
        return self._skipped(policy, cause, cause, message)

    def _skip_at_floor(self, outcome: Outcome) -> UpdateResult:
        """End the iteration after batches whose gradients overflow at the smallest scale."""
        gradients = [v.g for v in parameters_of([self.solver])]
        nans, infinities = (sum(int(f(g).sum()) for g in gradients) for f in (np.isnan, np.isinf))
        # The last attempt of a repeated batch had the smallest scale.
        floor = self.scale if self._searches else self.min_scale
        self._restore_scales()
        before = self._retries.hopeless - 1
        several = f", as in {before} batches before" if before > 0 else ""
        good = "" if math.isnan(self._s0.last_good) else f"; last good scale: {self._s0.last_good:g}"
        message = (
            f"gradients are not finite in iteration {self.iteration} at the smallest loss scale, {floor:g}"
            f"{several}; first bad layer: {outcome.where}; parameter gradients hold {nans} NaNs and "
            f"{infinities} infinities{good}. The scale is {self.scale:g} again. No scale helps that "
            f"min_scale allows: check the data, and {ANALYSE}"
        )
        return self._skipped(self.on_scale_floor, "overflow", "scale_floor", message)

    def _skipped(self, policy: str, reason: str, kind: str = "", message: str = "") -> UpdateResult:
        """End the iteration without an update, notify according to `policy`, and return the result."""
        # It ends in order, with its batches counted as lost: an error does not undo it.
        self._undone.clear()
        if policy == "raise":
            # On all ranks: no scale was the cause, so none stays lowered.
            self._restore_scales()
            raise LossScaleError(message)
        if policy == "warn":
            self._notifier.warn(kind, message)
        retries, last = self._retries.retries, self._retries.last
        return UpdateResult(
            False, self.scale, retries, reason, last.layers, last.layers, last.fault, last.component
        )
