# SPDX-License-Identifier: Apache-2.0
"""The adaptive updater: nnabla's dynamic loss scaling loop, with a scale for every layer."""

from __future__ import annotations

import math
import os
from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import nnabla as nn
from nnabla.experimental.mixed_precision_training import DynamicLossScalingUpdater

from ..core.config import AdaLossConfig
from ..core.layer_limits import LayerLimit, LayerLimitPolicy
from ..core.precision import StorageLike
from ..core.scale_policy import ScalePolicy, ScaleState
from ..core.validation import integer
from ..emulation import with_storage
from ..engine.adaptive_loss_scaling import AdaptiveLossScaling
from ..errors import LossScaleError
from ..graph.loss_like import LossLike, check_scale
from ..state import read_state, write_state
from .accumulation import accumulate
from .argument_checks import check_arguments, check_choice, keep_data
from .exchange import GradientExchange, check_interval
from .idle import Idle
from .reports import Reports, nonfinite_gradients, tell_of_float_storage
from .result import UpdateResult
from .states import restore, state_of
from .window import Window, examine


class _Cause(NamedTuple):
    """What all ranks take for the cause of gradients that are not finite."""

    nonfinite_loss: bool
    nonfinite_forward: bool
    global_scale: bool


class _Begun(NamedTuple):
    """An iteration that has begun: how scales were before it, and what its tries have come to."""

    scale_state: ScaleState
    limits: Mapping[str, LayerLimit]
    retries: int = 0
    layers: Tuple[str, ...] = ()


class AdaptiveLossScalingUpdater(DynamicLossScalingUpdater):  # type: ignore[misc]
    """Trains with a global loss scale that grows and backs off, and adaptive scales per layer on top.

    Takes the place of nnabla's `DynamicLossScalingUpdater`: the same positional arguments, in the same
    order, with the same defaults.

    Args:
        solver: the solver, with its parameters set.
        loss: the loss Variable of one element (or a wrapper of one, such as `FormatEmulation`).
        data_feeder: called without arguments before each forward to fill the input variables.
        scale: S0, the global loss scale to start with. 8.0, as the baseline.
        scaling_factor: what S0 is multiplied by to grow and divided by to back off. 2.0.
        N: S0 grows after more than this many updates without overflow. 2000.
        clear_buffer: free activations and gradients that are no longer needed. True.
        accum_grad: batches whose gradients are summed per update. 1. The gradients are added, not averaged,
            unless `average=True`; one overflow drops all of them.
        weight_decay: decay constant; None for no decay.
        comm: a communicator for data-parallel training; None for one process.
        grads: gradients to exchange; None (or empty) means those of all the solver's parameters.
        config: how layers are scaled; None for `AdaLossConfig()`.
        storage: emulate this storage format on a float context, for example `"float16"`, or a `Format` or
            `Precision`; None for the context's own types.
        max_retries: batches (or windows) that one call may throw away because of overflow before it
            returns without an update. 100, as the baseline; 0 skips an iteration instead of retrying it.
        on_nonfinite_loss: a loss that is not finite is no overflow and lowers no scale: `"raise"`
            (default) a LossScaleError, `"skip"` the update, or `"warn"` once and skip.
        on_nonfinite_forward: likewise, where the loss is finite but something in forward is not, in a way
            that no scale mends: NaN in the data behind a ReLU, or activations beyond the storage format.
        on_scale_floor: what to do about an overflow at `min_scale`: `"raise"` (default) a
            LossScaleError that names the first bad layer, `"skip"` the update, or `"warn"` once and skip.
        min_scale: S0 is never lowered below this. 2**-24, the smallest positive fp16 number.
        max_scale: S0 never grows above this. 2**64.
        hysteresis: overflows in a row it takes to lower S0. 1, as the baseline.
        on_gradients: called with the solver when the gradients are complete and unscaled, before weight
            decay and update: the place for clipping.
        average: average gradients over micro-batches and ranks instead of adding them. False, as the
            baseline.
        check_every: with a communicator: compare checksums of parameters and scales between ranks every so
            many iterations, and raise on every rank when they differ. 1000; 0 never does.

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
    ) -> None:
        check_arguments(solver, data_feeder, accum_grad, weight_decay, comm, grads)
        self.policy = ScalePolicy(scaling_factor, N, min_scale, max_scale, hysteresis)
        if integer("max_retries", max_retries) < 0:
            raise ValueError(f"max_retries={max_retries!r} must be 0 or more")
        self.check_every = check_interval("check_every", check_every)
        if on_gradients is not None and not callable(on_gradients):
            raise TypeError(
                f"on_gradients must be callable with the solver, got {type(on_gradients).__name__}"
            )
        choices = ("raise", "skip", "warn")
        self.on_nonfinite_loss = check_choice("on_nonfinite_loss", on_nonfinite_loss, choices)
        self.on_nonfinite_forward = check_choice("on_nonfinite_forward", on_nonfinite_forward, choices)
        self.on_scale_floor = check_choice("on_scale_floor", on_scale_floor, choices)
        self._config, self._storage, self.solver = config, storage, solver
        self._loss: Optional[LossLike] = None
        self.scaling: AdaptiveLossScaling
        self._idle = Idle()
        self._reports = Reports()
        self._before_exchange = False
        self._begun: _Begun
        self._interrupted: Optional[_Begun] = None
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
        tell_of_float_storage(loss, storage, config)
        self.max_retries = max_retries
        self.on_gradients = on_gradients
        self.average = average
        self.iteration = 0
        self.last_good_scale = math.nan
        self._hysteresis_left = hysteresis
        self._started = False

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
        with self._idle.update():
            resumed, self._interrupted = self._interrupted, None
            begun = self._begun = resumed or _Begun(self.scale_state, dict(self.scaling.limits))
            try:
                return self._update(resumed=resumed is not None)
            except LossScaleError:
                # Raised on all ranks alike: no scale was at fault.
                self.scale_state = begun.scale_state
                self.scaling.limits.clear()
                self.scaling.limits.update(begun.limits)
                raise
            except BaseException:
                if self._before_exchange:
                    self.iteration -= 1
                    self._undo_batch()
                    if self.comm is not None:
                        # Other ranks wait for this one in the same try of the same iteration.
                        self._interrupted = self._begun
                raise

    def _update(self, *, resumed: bool) -> UpdateResult:
        self._before_exchange = False
        self._start_iteration(resumed=resumed)
        scale_state, _, retries, layers = self._begun
        while True:
            self._begun = self._begun._replace(retries=retries, layers=layers)
            self._before_exchange = True
            window = self._run_window()
            self._exchange_gradients()
            self._before_exchange = False
            if not self._overflowed(window):
                break
            self._undo_batch()
            layers = window.nonfinite_layers
            cause = self._agree_on_cause(window)
            if cause.nonfinite_loss or cause.nonfinite_forward:
                return self._skip_bad_batch(window, cause, retries)
            if cause.global_scale:
                if self.policy.at_floor(self.scale_state):
                    return self._skip_at_floor(scale_state, layers, retries)
                self.scale_state = self.policy.after_overflow(self.scale_state)
            retries += 1
            if retries > self.max_retries:
                return UpdateResult(False, self.scale, retries, "overflow", layers)
        reason = self._reason()
        if self.scaling.guard.state.has_nonfinite():
            self._undo_batch()
        self._apply_gradients()
        self.last_good_scale = self.scale
        self.scale_state = self.policy.after_update(self.scale_state)
        self.scaling.after_update()
        return UpdateResult(True, self.scale, retries, reason, layers, window.nonfinite_layers)

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
        window = Window()

        def forward_backward() -> None:
            nonlocal window
            # The feeder may have assigned another loss.
            scaling = self.scaling
            with self._idle.lock:
                scaling.forward(clear_no_need_grad=self.clear_buffer)
                scaling.guard.after_forward()
                scaling.backward(self.scale, clear_buffer=self.clear_buffer, iteration=self.iteration)
                if scaling.found_inf:
                    window = examine(window, scaling, self.solver, self.policy.min_scale)

        def feed() -> None:
            scaling = self.scaling
            self.data_feeder()
            if self.scaling is not scaling:
                self.scaling.guard.begin(more=True)

        self.scaling.guard.begin()
        accumulate(self.solver, feed, self.accum_grad, forward_backward)
        return window

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
            scales = [self.scale, *(self.scaling.layer_scales.values() if self.scaling.delay else ())]
            self._exchange.check_ranks_agree(scales, self.iteration)

    def _exchange_gradients(self) -> None:
        own = self.scaling.shared_statistics() if self.comm is not None else None
        if own is None:
            self._exchange.sum(average=self.average)
        else:
            self.scaling.adopt_statistics(self._exchange.sum_with(own, average=self.average))

    def _agree_on_cause(self, window: Window) -> _Cause:
        """What all ranks take for the cause; layers that are to blame are lowered."""
        layers = self.scaling.layers
        unexplained = window.overflowed and window.layer_to_blame is None
        blamed = [layer == window.layer_to_blame for layer in layers]
        nonfinite_loss, nonfinite_forward, global_scale, *blamed = self._exchange.any(
            [window.nonfinite_loss, window.fault is not None, unexplained, *blamed]
        )
        if not (nonfinite_loss or nonfinite_forward or global_scale):
            for layer, flag in zip(layers, blamed):
                if flag:
                    scales = window.layer_scales or self.scaling.layer_scales
                    self.scaling.back_off(layer, scales.get(layer, 1.0))
        # The sum over ranks may overflow where no rank's own gradients did.
        return _Cause(nonfinite_loss, nonfinite_forward, global_scale or not any(blamed))

    def _overflowed(self, window: Window) -> bool:
        if self.comm is None:
            return window.overflowed
        return not self._exchange.all_finite()

    def _reason(self) -> str:
        """`"updated"`, or `"zero_gradients"`, which is warned of once."""
        if not self.scaling.guard.gradients_are_zero(self.solver.get_parameters().values()):
            return "updated"
        self._reports.warn(
            "zero_gradients",
            f"every gradient is exactly zero in iteration {self.iteration}, at loss scale {self.scale:g}, "
            "and the loss is not: the network is at rest, or everything underflows. Look at the loss weight",
        )
        return "zero_gradients"

    def _apply_gradients(self) -> None:
        if self.average and self.accum_grad > 1:
            self.solver.scale_grad(1.0 / self.accum_grad)
        if self.on_gradients is not None:
            self.on_gradients(self.solver)
        with self._idle.lock:
            if self.weight_decay is not None:
                self.solver.weight_decay(self.weight_decay)
            self.solver.update()

    def _skip_bad_batch(self, window: Window, cause: _Cause, retries: int) -> UpdateResult:
        here = window.nonfinite_loss if cause.nonfinite_loss else window.fault is not None
        where = "" if self.comm is None else f" of {'this' if here else 'another'} rank"
        subject = "the loss" if cause.nonfinite_loss else "the forward pass"
        detail = f": {window.fault}" if window.fault is not None else ""
        message = (
            f"{subject}{where} is not finite in iteration {self.iteration}{detail}; that is no overflow of "
            f"gradients, and the loss scale stays at {self.scale:g}. Look at the data and the learning rate"
        )
        if cause.nonfinite_loss:
            self._reports.act(self.on_nonfinite_loss, "nonfinite_loss", message)
        else:
            self._reports.act(self.on_nonfinite_forward, "nonfinite_forward", message)
        reason = "nonfinite_loss" if cause.nonfinite_loss else "nonfinite_forward"
        fault = "" if window.fault is None else str(window.fault)
        layers = window.nonfinite_layers
        return UpdateResult(False, self.scale, retries, reason, layers, layers, fault)

    def _skip_at_floor(self, scale_state: ScaleState, layers: Tuple[str, ...], retries: int) -> UpdateResult:
        nans, infinities = nonfinite_gradients(self.solver)
        floor, self.scale_state = self.scale, scale_state
        message = (
            f"gradients overflow in iteration {self.iteration} at the smallest loss scale, {floor:g}; "
            f"first bad layer: {layers[0] if layers else 'on another rank'}; parameter gradients hold "
            f"{nans} NaNs and {infinities} infinities; last good scale: {self.last_good_scale:g}. "
            f"The scale is {self.scale:g} again"
        )
        self._reports.act(self.on_scale_floor, "scale_floor", message)
        return UpdateResult(False, self.scale, retries, "overflow", layers, layers)

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
            with_storage(loss, self._storage),
            self._config,
            parameters=self.solver.get_parameters(),
            limit_policy=LayerLimitPolicy(self.policy.N),
            forward_state=None if self._loss is None else self.scaling.guard.state,
        )
        if scaling.variable.size != 1:
            raise ValueError(
                f"loss has shape {scaling.variable.shape}, not one element; "
                "reduce it with nnabla.functions.mean"
            )
        self._loss, self.scaling = loss, scaling

    @property
    def scale(self) -> float:
        """S0, the global loss scale; may be set between updates."""
        return self._scale

    @scale.setter
    def scale(self, value: float) -> None:
        self._scale = check_scale(value)

    @property
    def scale_state(self) -> ScaleState:
        """The global loss scale with its counters."""
        return ScaleState(self.scale, self._counter, self._hysteresis_left)

    @scale_state.setter
    def scale_state(self, state: ScaleState) -> None:
        self.scale, self._counter, self._hysteresis_left = state
