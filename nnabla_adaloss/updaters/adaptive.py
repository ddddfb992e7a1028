# SPDX-License-Identifier: Apache-2.0
"""The adaptive updater: nnabla's dynamic loss scaling loop, with measured scales and one for every layer."""

from __future__ import annotations

import math
import os
from typing import Any, Callable, Dict, Mapping, Optional, Sequence, Set, Tuple, Union

import nnabla as nn
from nnabla.experimental.mixed_precision_training import DynamicLossScalingUpdater

from ..core.config import AdaLossConfig
from ..core.keywords import explains_keywords
from ..core.layer_limits import LayerLimitPolicy
from ..core.precision import StorageLike
from ..core.scale_history import HistoryPolicy
from ..core.scale_policy import ScalePolicy, ScaleState
from ..emulation import with_storage
from ..engine.adaptive_loss_scaling import AdaptiveLossScaling
from ..errors import LossScaleError
from ..graph.loss_like import LossLike, check_scale
from ..monitor import Audience, BatchThrownAway, ScaleChanged, audience_of
from ..state import read_state, write_state
from .argument_checks import check_arguments, keep_data
from .batch_run import BatchRun
from .cause import Cause, agree_on_cause
from .counters import Counters
from .exchange import GradientExchange
from .function_hooks import HookLike, function_hooks
from .global_scale import history_of
from .idle import Idle
from .reports import Reports, nonfinite_gradients, tell_of_float_storage
from .result import UpdateResult
from .settings import Settings
from .shared_state import adopt_shared_state, agreed_scales, reached_state, shared_state
from .states import restore, state_of
from .telling import tell_of_update
from .tries import Tries
from .window import NOTHING_WRONG, Window

# So many batches in a row that no scale helps are no matter of single batches. nnabla's updater would have
# halved its scale as often, to where no gradient is left.
_HOPELESS = 25
_SEARCHED = 'with global_scale="dynamic"'
# Of torch's GradScaler.
_ARGUMENTS = {
    "init_scale": "use scale=",
    "growth_factor": f"use scaling_factor= {_SEARCHED}",
    "backoff_factor": f"use scaling_factor= {_SEARCHED}, by which the scale is divided",
    "growth_interval": f"use N= {_SEARCHED}",
    "enabled": "use nnabla's solver by itself, or FixedLossScalingUpdater(scale=1.0)",
}


class AdaptiveLossScalingUpdater(Settings, DynamicLossScalingUpdater):  # type: ignore[misc]
    """Trains with a loss scale that is measured, not searched for, and adaptive scales per layer on top.

    Takes the place of nnabla's `DynamicLossScalingUpdater`: the same positional arguments, in the same
    order, with the same defaults.

    Args:
        solver: the solver, with its parameters set.
        loss: the loss Variable of one element (or a wrapper of one, such as `FormatEmulation`).
        data_feeder: called without arguments before each forward to fill the input variables.
        scale: S0, the global loss scale to start with. 8.0, as the baseline.
        scaling_factor: what S0 is multiplied by to grow and divided by to back off, with
            `global_scale="dynamic"`. 2.0.
        N: S0 grows after more than this many updates without overflow, likewise; and the limit of a layer
            that overflowed. 2000.
        clear_buffer: free activations and gradients that are no longer needed. True.
        accum_grad: batches whose gradients are summed per update. 1. The gradients are added, not averaged,
            unless `average=True`; one overflow drops all of them.
        weight_decay: decay constant; None for no decay.
        comm: a communicator for data-parallel training; None for one process.
        grads: gradients to exchange; None (or empty) means those of all the solver's parameters.
        global_scale: `"history"` (default): the largest scale that the gradients of the last iterations leave
            room for, from the first batch on, or a `HistoryPolicy` with settings of your own; or `"dynamic"`:
            grows and backs off as the baseline's.
        on_overflow: `"repeat"` (default): the same batch again, with what overflowed lowered, so that no
            batch is lost; or `"next"`: throw the batch away and take the next one, as the baseline does.
        config: how layers are scaled; None for `AdaLossConfig()`.
        storage: emulate this storage format on a float context, for example `"float16"`, or a `Format` or
            `Precision`; None for the context's own types.
        max_retries: how often one call may repeat a batch because of overflow before `on_scale_floor`
            applies, or with `on_overflow="next"` how many batches (or windows) it may throw away before it
            returns without an update. 100, as the baseline; 0 skips an iteration instead of retrying it.
        on_nonfinite_loss: a loss that is not finite is no overflow and lowers no scale: `"raise"`
            (default) a LossScaleError, `"skip"` the update, or `"warn"` once and skip.
        on_nonfinite_forward: likewise, where the loss is finite but something in forward is not, in a way
            that no scale mends: NaN in the data behind a ReLU, or activations beyond the storage format.
        on_scale_floor: what to do about an overflow at `min_scale`, where the same batch is repeated: about
            three such batches in a row (single ones are thrown away, and told of once): `"raise"` (default) a
            LossScaleError that names the first bad layer, `"skip"` the update, or `"warn"` once and skip.
        min_scale: S0 is never lowered below this. 2**-24, the smallest positive fp16 number.
        max_scale: S0 never grows above this, with `global_scale="dynamic"`. 2**64.
        hysteresis: overflows in a row it takes to lower S0, likewise. 1, as the baseline.
        on_gradients: called with the solver when the gradients are complete and unscaled, before weight
            decay and update: the place for clipping.
        average: average gradients over micro-batches and ranks instead of adding them. False, as the
            baseline.
        check_every: with a communicator: compare checksums of parameters and scales between ranks every so
            many iterations, and raise on every rank when they differ. 1000; 0 never does.
        monitors: who is told what happens: objects with some of the methods of `Monitor`, such as `Recorder`,
            `LogMonitor` and `NanDump`. None of them costs nothing.
        function_pre_hook: called with each function before it runs, in forward and in backward; or a pair of
            hooks, for forward and for backward. For nnabla's `TimeProfiler` (its `pre_hook`, within a
            scope) and for hooks of your own. With one for backward, scales are applied around each
            function. None.
        function_post_hook: likewise, after each function has run. Gradients of parameters are unscaled by
            then, those of activations still carry their scales. For
            `NanInfTracer`: `(tracer.forward_post_hook, tracer.backward_post_hook)`. None.
        float_tail: in half precision, native or emulated, compute functions of one element at the loss in
            float, and functions with a constant that half cannot hold, as PyTorch's autocast computes losses:
            in half, `loss * 1e-8` is `loss * 0`. In a half context it replaces these functions in the graph.
            True; False leaves the graph as it is.

    These are its attributes as well. What is assigned to one between updates is checked as here, and obeyed;
    where other things were made with it (`comm`, `grads`, `config`, `storage`, `on_overflow`, the hooks, ...)
    that raises AttributeError.

    Attributes:
        counters: how many updates, batches and repeats there were, and how many batches were lost, by cause.

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it. Nothing was changed.

    Example:
        >>> import numpy as np, nnabla as nn, nnabla.functions as F, nnabla.parametric_functions as PF
        >>> import nnabla.solvers as S
        >>> x = nn.Variable.from_numpy_array(np.ones((4, 3), np.float32))
        >>> loss = F.mean(PF.affine(F.tanh(PF.affine(x, 5, name="a")), 2, name="b") ** 2)
        >>> solver = S.Sgd(0.1)
        >>> solver.set_parameters(nn.get_parameters())
        >>> updater = AdaptiveLossScalingUpdater(solver, loss, storage="float16")
        >>> updater.update().updated
        True
    """

    @explains_keywords(_ARGUMENTS)
    def __init__(
        self,
        solver: Any,
        loss: LossLike,
        data_feeder: Callable[[], Any] = keep_data,
        scale: float = 8.0,
        scaling_factor: float = 2.0,
        N: int = 2000,
        clear_buffer: bool = True,
        accum_grad: int = 1,
        weight_decay: Optional[float] = None,
        comm: Optional[Any] = None,
        grads: Optional[Sequence[nn.NdArray]] = None,
        *,
        global_scale: Union[str, HistoryPolicy] = "history",
        on_overflow: str = "repeat",
        config: Optional[AdaLossConfig] = None,
        storage: Optional[StorageLike] = None,
        max_retries: int = 100,
        on_nonfinite_loss: str = "raise",
        on_nonfinite_forward: str = "raise",
        on_scale_floor: str = "raise",
        min_scale: float = 2.0**-24,
        max_scale: float = 2.0**64,
        hysteresis: int = 1,
        on_gradients: Optional[Callable[[Any], Any]] = None,
        average: bool = False,
        check_every: int = 1000,
        monitors: Sequence[Any] = (),
        function_pre_hook: HookLike = None,
        function_post_hook: HookLike = None,
        float_tail: bool = True,
    ) -> None:
        check_arguments(solver, data_feeder, accum_grad, weight_decay, comm, grads)
        self._policy = ScalePolicy(scaling_factor, N, min_scale, max_scale, hysteresis)
        self._hysteresis_left = hysteresis
        self.max_retries, self.check_every, self.on_gradients = max_retries, check_every, on_gradients
        self.on_nonfinite_loss, self.on_nonfinite_forward = on_nonfinite_loss, on_nonfinite_forward
        self.on_scale_floor, self.on_overflow = on_scale_floor, on_overflow
        self._hooks = function_hooks(function_pre_hook, function_post_hook)
        self.history = history_of(global_scale, check_scale(scale), min_scale)
        self._measured = self.history is not None
        self.config, self.storage, self.solver, self.global_scale = config, storage, solver, global_scale
        self.monitors, self.float_tail = monitors, float_tail
        self.function_pre_hook, self.function_post_hook = function_pre_hook, function_post_hook
        self._loss: Optional[LossLike] = None
        self.scaling: AdaptiveLossScaling
        self._audience = audience_of(monitors)
        self.counters = Counters()
        self._idle = Idle()
        self._reports = Reports()
        self._before_exchange = False
        self._repeat = on_overflow == "repeat"
        self._reached = scale
        self._tries: Tries
        self._interrupted: Optional[Tries] = None
        self.iteration = 0
        self.loss = loss
        self._exchange = GradientExchange(comm, grads, solver)
        super().__init__(
            solver,
            loss,
            data_feeder,
            check_scale(scale),
            scaling_factor,
            N,
            clear_buffer,
            accum_grad,
            weight_decay,
            comm,
            self._exchange.grads if comm is not None else [],
        )
        if self.history is not None:
            # The policy's own, also where that is not the baseline's.
            self.scale = self.history.start_scale
        tell_of_float_storage(self.scaling, storage, config)
        self.average = average
        self.last_good_scale = math.nan
        self._started = False
        # Keys of the parameters that the solver had when that was last asked.
        self._trained: Set[int] = set()
        # Keys of those to which the batches of the last window added more than zeros.
        self._nonzero: Set[int] = set()

    def update(self) -> UpdateResult:
        """Train on one batch, or on `accum_grad` of them.

        Zeroes the gradients, feeds, runs forward and scaled backward, exchanges gradients, throws the batch
        away and tries the next one while they are not finite, applies `on_gradients` and weight decay,
        and updates the parameters.

        Returns:
            What happened; `result.updated` tells whether the parameters changed.

        Raises:
            LossScaleError: the loss is not finite, or gradients overflow at the smallest scale, and the
                policy for that is `"raise"`. The parameters are as before.
        """
        with self._idle:
            resumed, self._interrupted = self._interrupted, None
            scale_before = self._scale
            self._tries = resumed or Tries(self.scale_state, dict(self.scaling.limits))
            try:
                result = self._update(resumed=resumed is not None)
            except LossScaleError:
                # Raised on all ranks alike: no scale was at fault.
                self._forget_overflows()
                raise
            except BaseException:
                if self._before_exchange:
                    self.iteration -= 1
                    self._undo_batch()
                    if self.comm is not None:
                        # Other ranks wait for this one in the same try of the same iteration.
                        self._interrupted = self._tries
                raise
            if self._audience is not None:
                self._tell_of_update(self._audience, result, scale_before)
            return result

    def _update(self, *, resumed: bool) -> UpdateResult:
        self._before_exchange = False
        self._start_iteration(resumed=resumed)
        tries = self._tries
        while True:
            self._before_exchange = True
            window = self._run_window()
            self._exchange_gradients()
            self._before_exchange = False
            if not self._overflowed(window):
                break
            self._undo_batch()
            cause = agree_on_cause(self._exchange, window, self.scaling, repeat=self._repeat)
            if cause.bad_batch:
                return self._skip_bad_batch(window, cause)
            tries.layers = window.nonfinite_layers
            hopeless = cause.at_floor or (cause.global_scale and not self._lower_global_scale())
            self._throw_away("hopeless" if hopeless else cause.word, tries.layers)
            if hopeless:
                tries.hopeless += 1
                searching = not (self._repeat or self._measured)
                if searching or tries.hopeless == _HOPELESS or tries.thrown_away == self.max_retries:
                    return self._skip_at_floor()
                # No scale helps this batch, so that none of those that were tried is kept.
                self._forget_overflows()
                self._reports.tell_of_hopeless_batch(self.iteration, tries.layers)
            tries.thrown_away += 1
            if cause.exhausted or tries.thrown_away > self.max_retries:
                return self._give_up()
        reason = self._reason()
        if not self.scaling.state_is_finite():
            self._undo_batch()
        self._apply_gradients()
        if self._measured:
            self._scale = self._reached
        self.last_good_scale = self._scale
        if not self._measured:
            self.scale_state = self.policy.after_update(self.scale_state)
        self.scaling.after_update()
        self.counters.count_update(self.accum_grad)
        layers = tries.layers or window.overflow_layers
        return UpdateResult(True, self.scale, tries.retries, reason, layers, window.nonfinite_layers)

    @property
    def parameters_lock(self) -> Any:
        """A lock that is held while parameters are swapped for copies or being updated: hold it to read them.

        For other threads, as in `with updater.parameters_lock: copy = parameter.d.copy()`. It is free while
        the data feeder runs and between updates. Two threads must not read one array at a time (nnabla casts
        without Python's lock): hold it in the training thread, too, while you read there. In a signal handler
        use `when_idle`.
        """
        return self._idle.lock

    def when_idle(self, callback: Callable[[], Any]) -> None:
        """Call `callback` between two updates: at once if none is running, else at the end of the one that
        is.

        The place for checkpoints that a signal asks for: in a handler parameters may be swapped for copies at
        that moment, and `nnabla.save_parameters` would save these.

        Args:
            callback: called without arguments, in the thread that updates, if an update is running. Callbacks
                run one after another.

        Raises:
            TypeError: it cannot be called.
        """
        self._idle.when_idle(callback)

    def state_dict(self) -> Dict[str, Any]:
        """Everything that decides the next step, apart from parameters, solver states and data."""
        return state_of(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that `state_dict` returned. Load the parameters before.

        Raises:
            ValueError: the state is damaged, of a newer version, of another network, or of an updater with
                other settings. Nothing changes then.
        """
        restore(self, state)
        self._interrupted = None

    def save_states(self, path: Union[str, os.PathLike[str]]) -> None:
        """Write the state to `path`, beside the solver's own `save_states`; whole or not at all.

        Raises:
            ValueError: the state is larger than a file may be that `load_states` reads.
            OSError: the file cannot be written; an older one is left as it was.
        """
        write_state(path, self.state_dict())

    def load_states(self, path: Union[str, os.PathLike[str]]) -> None:
        """Go on from a file that `save_states` wrote. Load parameters and solver states before.

        Raises:
            ValueError: the file is truncated or damaged, or its state cannot be loaded here. Nothing changes.
            OSError: the file cannot be read.
        """
        self.load_state_dict(read_state(path))

    def _run_window(self) -> Window:
        """Zero the gradients, then feed, run forward and backward `accum_grad` times."""
        window = NOTHING_WRONG
        self.scaling.guard.begin()
        self.solver.zero_grad()
        for index in range(self.accum_grad):
            # May assign another loss, and rewire this one.
            self.data_feeder()
            self.scaling.guard.before_forward()
            window = self._batch_run().run(window, first=not index)
            self._nonzero = self.scaling.nonzero_leaves | (self._nonzero if index else set())
        return window

    def _batch_run(self) -> BatchRun:
        return BatchRun(
            self.scaling,
            self.solver,
            self._idle.lock,
            self.iteration,
            lambda: None if self._measured else self._scale,
            self._lower_global_scale,
            self.policy.min_scale,
            self._repeat,
            self.max_retries,
            self.clear_buffer,
            self._tries,
            self.counters,
            self._hooks,
        )

    def _lower_global_scale(self) -> bool:
        if self._measured or self.policy.at_floor(self.scale_state):
            return False
        self.scale_state = self.policy.after_overflow(self.scale_state)
        return True

    def _undo_batch(self) -> None:
        """Put back what forward has written in this window; graphs of a network share what is kept."""
        with self._idle.lock:
            self.scaling.guard.undo()

    def _start_iteration(self, *, resumed: bool) -> None:
        if not self.iteration:
            self._reports.check_what_is_trained(self.solver, self.scaling.plan)
        self.iteration += 1
        if self.comm is None:
            return
        if hasattr(self.comm, "iteration"):
            self.comm.iteration = self.iteration
        if resumed:
            return
        if not self._started:
            self._exchange.broadcast_parameters()
            self._started = True
        elif self.check_every and self.iteration % self.check_every == 0:
            self._exchange.check_ranks_agree(agreed_scales(self), self.iteration)

    def _exchange_gradients(self) -> None:
        if self.comm is None:
            self._reached = self.scaling.loss_scale if self._measured else self._scale
            return
        state, own = reached_state(self), shared_state(self)
        if own is None:
            self._exchange.sum(average=self.average)
        else:
            state = adopt_shared_state(self, self._exchange.sum_with(own, average=self.average))
        # What was measured becomes the updater's scale when the batch has been good for an update.
        self._reached = state.scale
        if not self._measured:
            self.scale_state = state

    def _overflowed(self, window: Window) -> bool:
        if self.comm is None:
            return window.overflowed
        return not self._exchange.all_finite(self.scaling.kernels)

    def _reason(self) -> str:
        """`"updated"`, or `"zero_gradients"`."""
        # To ask a solver for its parameters takes as long as all the rest here.
        if self._nonzero.isdisjoint(self._trained):
            parameters = self.solver.get_parameters().values()
            self._trained = {hash(v) for v in parameters}
            guard = self.scaling.guard
            # Other ranks, and hooks, may have added to what this one has left at zero.
            if self._nonzero.isdisjoint(self._trained) and guard.gradients_are_zero(parameters):
                self._reports.note_zero_gradients(self.iteration, self.scale, loss_is_zero=guard.loss_is_zero)
                return "zero_gradients"
        self._reports.note_gradients(self.iteration)
        return "updated"

    def _apply_gradients(self) -> None:
        if self.average and self.accum_grad > 1:
            self.solver.scale_grad(1.0 / self.accum_grad)
        if self.on_gradients is not None:
            self.on_gradients(self.solver)
        with self._idle.lock:
            if self.weight_decay is not None:
                self.solver.weight_decay(self.weight_decay)
            self.solver.update()

    def _skip_bad_batch(self, window: Window, cause: Cause) -> UpdateResult:
        self.scaling.components.drop_iteration()
        here = window.nonfinite_loss if cause.nonfinite_loss else window.fault is not None
        whose = "" if self.comm is None else f" of {'this' if here else 'another'} rank"
        reason = cause.word
        policy = self.on_nonfinite_loss if cause.nonfinite_loss else self.on_nonfinite_forward
        fault = "" if window.fault is None else str(window.fault)
        self._throw_away(reason, window.nonfinite_layers, fault)
        self._reports.bad_batch(policy, reason, whose, fault, self.iteration, self.scale)
        layers = window.nonfinite_layers
        return UpdateResult(False, self.scale, self._tries.retries, reason, layers, layers, fault)

    def _throw_away(self, cause: str, layers: Tuple[str, ...], detail: str = "") -> None:
        """Count and tell that the batches of a window are lost."""
        self.counters.count_lost(cause, self.accum_grad)
        if self._audience is not None:
            self._audience.tell(BatchThrownAway(self.iteration, cause, layers, self.accum_grad, detail))

    def _tell_of_update(self, audience: Audience, result: UpdateResult, scale_before: float) -> None:
        if self._scale != scale_before:
            audience.tell(ScaleChanged(self.iteration, scale_before, self._scale))
        tell_of_update(audience, self.iteration, result, self.scaling.variable)

    def _forget_overflows(self) -> None:
        self.scale_state = self._tries.scale_state
        self.scaling.limits.clear()
        self.scaling.limits.update(self._tries.limits)
        self.scaling.components.drop_iteration()

    def _skip_at_floor(self) -> UpdateResult:
        bad = nonfinite_gradients(self.solver)
        # A batch that was repeated was tried with the smallest scale at the end.
        floor = self.policy.min_scale if self._repeat or self._measured else self._scale
        self._forget_overflows()
        layers = self._tries.layers
        self._reports.floor(
            self.on_scale_floor, self.iteration, floor, layers, bad, self.last_good_scale, self.scale
        )
        return UpdateResult(False, self.scale, self._tries.retries, "overflow", layers, layers)

    def _give_up(self) -> UpdateResult:
        tries = self._tries
        self.scaling.components.end_iteration()
        if self._repeat and self.max_retries:
            self._reports.exhausted(self.on_scale_floor, self.iteration, tries.retries, tries.layers)
        return UpdateResult(False, self.scale, tries.retries, "overflow", tries.layers)

    @property
    def loss(self) -> LossLike:
        """The loss that is trained on; assign another for a graph that changes between iterations."""
        assert self._loss is not None
        return self._loss

    @loss.setter
    def loss(self, loss: LossLike) -> None:
        if self._loss is not None and loss is self._loss:
            return
        scaling = AdaptiveLossScaling(
            with_storage(
                loss, self.storage, float_tail=self.float_tail, parameters=self.solver.get_parameters
            ),
            # Checked and completed already, which takes longer than to read a small graph.
            self.config if self._loss is None else self.scaling.config,
            parameters=self.solver.get_parameters,
            limit_policy=LayerLimitPolicy(self.policy.N),
            history=self.history,
            float_tail=self.float_tail,
        )
        if scaling.variable.size != 1:
            raise ValueError(
                f"loss has shape {scaling.variable.shape}, not one element; "
                "reduce it with nnabla.functions.mean"
            )
        if self._loss is not None:
            scaling.go_on_from(self.scaling)
        scaling.audience = self._audience
        self._loss, self.scaling = loss, scaling

    @property
    def policy(self) -> ScalePolicy:
        """How `global_scale="dynamic"` searches for the scale; `N`, `scaling_factor`, ... are its numbers."""
        return self._policy

    @policy.setter
    def policy(self, policy: ScalePolicy) -> None:
        if policy == self._policy:
            return
        self._policy, self.scaling.limit_policy = policy, LayerLimitPolicy(policy.N)
        self._hysteresis_left = min(self._hysteresis_left, policy.hysteresis)

    @property
    def scale(self) -> float:
        """S0, the global loss scale; may be set between updates.

        With `global_scale="history"`: what was chosen for the last batch; setting it starts anew from there.
        """
        return self._scale

    @scale.setter
    def scale(self, value: float) -> None:
        self._scale = check_scale(value)
        if self._measured and self._loss is not None:
            self.scaling.restart(self._scale)

    @property
    def scale_state(self) -> ScaleState:
        """The global loss scale with its counters, as `global_scale="dynamic"` uses them."""
        return ScaleState(self._scale, self._counter, self._hysteresis_left)

    @scale_state.setter
    def scale_state(self, state: ScaleState) -> None:
        self._scale, self._counter, self._hysteresis_left = state
