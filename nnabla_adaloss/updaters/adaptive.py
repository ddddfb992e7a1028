# SPDX-License-Identifier: Apache-2.0
"""The adaptive updater: nnabla's dynamic loss scaling loop, with a scale for every layer."""

from __future__ import annotations

import math
import warnings
from typing import Any, Callable, NamedTuple, Optional, Sequence, Tuple, Union

import nnabla as nn
from nnabla.experimental.mixed_precision_training import DynamicLossScalingUpdater

from ..core.config import AdaLossConfig
from ..core.formats import Format
from ..core.scale_policy import ScalePolicy, ScaleState
from ..engine.adaptive_loss_scaling import AdaptiveLossScaling
from ..engine.loss_like import LossLike, check_scale
from ..errors import LossScaleError, LossScaleWarning
from .arguments import check_arguments, check_choice, keep_data
from .exchange import GradientExchange
from .result import UpdateResult
from .storage import with_storage


class _Window(NamedTuple):
    """What happened in one window of ``accum_grad`` batches on this rank."""

    found_inf: bool
    nonfinite_loss: bool
    overflow_layers: Tuple[str, ...]


class AdaptiveLossScalingUpdater(DynamicLossScalingUpdater):  # type: ignore[misc]
    """Trains with a global loss scale that grows and backs off, and adaptive scales per layer on top.

    Takes the place of nnabla's ``DynamicLossScalingUpdater``: the same positional arguments, in the same
    order, with the same defaults.

    Args:
        solver: The solver, with its parameters set.
        loss: The loss Variable of one element (or a wrapper of one, such as ``FormatEmulation``).
        data_feeder: Called without arguments before each forward to fill the input variables.
        scale: S0, the global loss scale to start with. 8.0, as the baseline.
        scaling_factor: What S0 is multiplied by to grow and divided by to back off. 2.0.
        N: S0 grows after more than this many updates without overflow. 2000.
        clear_buffer: Free activations and gradients that are no longer needed. True.
        accum_grad: Batches whose gradients are summed per update. 1. The gradients are added, not averaged,
            unless ``average=True``; one overflow drops all of them.
        weight_decay: Decay constant; None for no decay.
        comm: A communicator for data-parallel training; None for one process.
        grads: Gradients to exchange; None (or empty) means those of all the solver's parameters.
        config: How layers are scaled; None for ``AdaLossConfig()``.
        storage: Emulate this storage format on a float context, for example ``"float16"``; None for the
            context's own types.
        max_retries: Batches (or windows) that one call may throw away because of overflow before it
            returns without an update. 100, as the baseline; 0 skips an iteration instead of retrying it.
        on_nonfinite_loss: A loss that is not finite is no overflow and lowers no scale: ``"raise"``
            (default) a LossScaleError, ``"skip"`` the update, or ``"warn"`` once and skip.
        on_scale_floor: What to do about an overflow at ``min_scale``: ``"raise"`` (default) a
            LossScaleError that names the first bad layer, ``"skip"`` the update, or ``"warn"`` once and skip.
        min_scale: S0 is never lowered below this. 2**-24, the smallest positive fp16 number.
        max_scale: S0 never grows above this. 2**64.
        hysteresis: Overflows in a row it takes to lower S0. 1, as the baseline.
        on_gradients: Called with the solver when the gradients are complete and unscaled, before weight
            decay and update: the place for clipping.
        average: Average gradients over micro-batches and ranks instead of adding them. False, as the
            baseline.

    Raises:
        TypeError, ValueError: An argument is not as described; the message names it. Nothing was changed.

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
        storage: Optional[Union[str, Format]] = None,
        max_retries: int = 100,
        on_nonfinite_loss: str = "raise",
        on_scale_floor: str = "raise",
        min_scale: float = 2.0**-24,
        max_scale: float = 2.0**64,
        hysteresis: int = 1,
        on_gradients: Optional[Callable[[Any], Any]] = None,
        average: bool = False,
    ) -> None:
        check_arguments(solver, data_feeder, accum_grad, weight_decay, comm, grads)
        policy = ScalePolicy(scaling_factor, N, min_scale, max_scale, hysteresis)
        if max_retries < 0:
            raise ValueError(f"max_retries={max_retries!r} must be 0 or more")
        if on_gradients is not None and not callable(on_gradients):
            raise TypeError(
                f"on_gradients must be callable with the solver, got {type(on_gradients).__name__}"
            )
        choices = ("raise", "skip", "warn")
        self.on_nonfinite_loss = check_choice("on_nonfinite_loss", on_nonfinite_loss, choices)
        self.on_scale_floor = check_choice("on_scale_floor", on_scale_floor, choices)
        self._config, self._storage = config, storage
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
        self.max_retries = max_retries
        self.on_gradients = on_gradients
        self.average = average
        self.iteration = 0
        self._policy = policy
        self._hysteresis_left = policy.hysteresis
        self._warned: set[str] = set()
        self._last_good_scale = math.nan

    def update(self) -> UpdateResult:
        """Train on one batch, or on ``accum_grad`` of them.

        Zeroes the gradients, feeds, runs forward and scaled backward, exchanges gradients, throws the batch
        away and tries the next one while they are not finite, applies ``on_gradients`` and weight decay,
        and updates the parameters.

        Returns:
            What happened; ``result.updated`` tells whether the parameters changed.

        Raises:
            LossScaleError: The loss is not finite, or gradients overflow at the smallest scale, and the
                policy for that is ``"raise"``. The parameters are as before.
        """
        self.iteration += 1
        retries = 0
        while True:
            window = self._run_window()
            self._exchange.sum(average=self.average)
            if not self._bad(window):
                break
            if self._exchange.any(window.nonfinite_loss):
                return self._skip_nonfinite_loss(window, retries)
            if self._policy.at_floor(self._state):
                return self._skip_at_floor(window, retries)
            self._state = self._policy.after_overflow(self._state)
            retries += 1
            if retries > self.max_retries:
                return UpdateResult(False, self.scale, retries, "overflow", window.overflow_layers)
            layers = window.overflow_layers
        self._apply_gradients()
        self._last_good_scale = self.scale
        self._state = self._policy.after_update(self._state)
        return UpdateResult(True, self.scale, retries, "updated", layers if retries else ())

    def _run_window(self) -> _Window:
        self.solver.zero_grad()
        layers: Tuple[str, ...] = ()
        nonfinite_loss = False
        for _ in range(self.accum_grad):
            self.data_feeder()
            self.scaling.forward(clear_no_need_grad=self.clear_buffer)
            self.scaling.backward(self.scale, clear_buffer=self.clear_buffer)
            found = self.scaling.found_inf
            if found and not layers:
                layers = tuple(found)
            if found and not nonfinite_loss:
                nonfinite_loss = not math.isfinite(float(self.scaling.variable.d))
        return _Window(bool(layers), nonfinite_loss, layers)

    def _bad(self, window: _Window) -> bool:
        if self.comm is None:
            return window.found_inf
        # Infinities and NaNs travel through the sum: every rank sees the same ones.
        return bool(self.solver.check_inf_or_nan_grad())

    def _apply_gradients(self) -> None:
        if self.average and self.accum_grad > 1:
            self.solver.scale_grad(1.0 / self.accum_grad)
        if self.on_gradients is not None:
            self.on_gradients(self.solver)
        if self.weight_decay is not None:
            self.solver.weight_decay(self.weight_decay)
        self.solver.update()

    def _skip_nonfinite_loss(self, window: _Window, retries: int) -> UpdateResult:
        message = (
            f"the loss is not finite in iteration {self.iteration}; that is no overflow of gradients, and "
            f"the loss scale stays at {self.scale:g}. Look at the data and the learning rate"
        )
        self._tell(self.on_nonfinite_loss, "nonfinite_loss", message)
        return UpdateResult(False, self.scale, retries, "nonfinite_loss", window.overflow_layers)

    def _skip_at_floor(self, window: _Window, retries: int) -> UpdateResult:
        layer = window.overflow_layers[0] if window.overflow_layers else "another rank's"
        message = (
            f"gradients overflow in iteration {self.iteration} at the smallest loss scale, {self.scale:g}; "
            f"first bad layer: {layer}; last good scale: {self._last_good_scale:g}"
        )
        self._tell(self.on_scale_floor, "scale_floor", message)
        return UpdateResult(False, self.scale, retries, "overflow", window.overflow_layers)

    def _tell(self, policy: str, kind: str, message: str) -> None:
        if policy == "raise":
            raise LossScaleError(message)
        if policy == "warn" and kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, LossScaleWarning, stacklevel=4)

    @property
    def loss(self) -> LossLike:
        """The loss that is trained on; assign another for a graph that changes between iterations."""
        return self._loss

    @loss.setter
    def loss(self, loss: LossLike) -> None:
        if loss is getattr(self, "_loss", None):
            return
        scaling = AdaptiveLossScaling(with_storage(loss, self._storage), self._config)
        if scaling.variable.size != 1:
            raise ValueError(
                f"loss has shape {scaling.variable.shape}, not one element; "
                "reduce it with nnabla.functions.mean"
            )
        self._loss, self.scaling = loss, scaling

    @property
    def _state(self) -> ScaleState:
        return ScaleState(self.scale, self._counter, self._hysteresis_left)

    @_state.setter
    def _state(self, state: ScaleState) -> None:
        self.scale, self._counter, self._hysteresis_left = state
