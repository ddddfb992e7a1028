# SPDX-License-Identifier: Apache-2.0
"""Fixed loss scaling: one scale that never changes."""

from __future__ import annotations

from typing import Any, Callable, Optional, Sequence, Tuple

import nnabla as nn
import numpy as np

from ..core.precision import StorageLike
from ..core.validation import boolean, explains_keywords
from ..emulation import FormatEmulation, with_storage
from ..engine import AdaptiveLossScaling
from ..graph.float_tail import TailReader
from ..graph.loss import LossLike, check_scale, variable_of
from ..monitor import BatchThrownAway, Overflowed, audience_of
from .exchange import GradientExchange
from .notifications import notify_beginning, notify_update
from .notifier import Notifier
from .retries import UpdateResult
from .settings import Setting, Settings, keep_data


class FixedLossScalingUpdater(Settings):
    """Trains with one constant loss scale; a batch whose gradients overflow is dropped.

    Args:
        solver: the solver, with its parameters set.
        loss: the loss Variable of one element (or a wrapper of one, such as `FormatEmulation`).
        data_feeder: called without arguments before each forward to fill the input variables.
        scale: the loss scale. 128.0, the usual first try for fp16.
        drop_overflow_update: drop the update when a gradient is not finite; False does it all the same.
        clear_buffer: free activations and gradients that are no longer needed. True.
        accum_grad: batches whose gradients are summed per update. 1.
        weight_decay: decay constant; None for no decay.
        comm: a communicator for data-parallel training; None for one process.
        grads: gradients to exchange; None (or empty) means those of all the solver's parameters.
        storage: emulate this storage format on a float context, for example `"float16"` or `"fp8_hybrid"`.
        monitors: objects with some of the methods of `Monitor`, such as `Recorder`. No layer gets a scale of
            its own here, so their events are updates and dropped batches.
        float_tail: as for `AdaptiveLossScalingUpdater`: in half precision, functions at the loss compute in
            float. True.

    All of these are attributes as well, but for `grads` and `monitors`. A value assigned between updates is
    checked as here and used from then on; `comm`, `storage` and `float_tail` raise AttributeError instead.

    Attributes:
        iteration: how many updates were tried.

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it. Nothing was changed.

    Example:
        >>> import numpy as np, nnabla as nn, nnabla.functions as F, nnabla.parametric_functions as PF
        >>> import nnabla.solvers as S
        >>> from nnabla_adaloss import FixedLossScalingUpdater
        >>> x = nn.Variable.from_numpy_array(np.ones((4, 3), np.float32))
        >>> loss = F.mean(PF.affine(x, 2) ** 2)
        >>> solver = S.Sgd(0.1)
        >>> solver.set_parameters(nn.get_parameters())
        >>> FixedLossScalingUpdater(solver, loss, scale=64.0).update().updated
        True
    """

    scale: Any = Setting(lambda name, value: check_scale(value, name))
    drop_overflow_update: Any = Setting(boolean)

    @explains_keywords({"config": "AdaptiveLossScalingUpdater gives layers scales of their own"})
    def __init__(
        self,
        solver: Any,
        loss: LossLike,
        data_feeder: Callable[[], Any] = keep_data,
        scale: float = 128.0,
        drop_overflow_update: bool = True,
        clear_buffer: bool = True,
        accum_grad: int = 1,
        weight_decay: Optional[float] = None,
        comm: Optional[Any] = None,
        grads: Optional[Sequence[nn.NdArray]] = None,
        *,
        storage: Optional[StorageLike] = None,
        monitors: Sequence[Any] = (),
        float_tail: bool = True,
    ) -> None:
        self.storage, self.float_tail, self.comm, self.solver = storage, float_tail, comm, solver
        self.scale, self.drop_overflow_update, self.clear_buffer = scale, drop_overflow_update, clear_buffer
        self.data_feeder, self.accum_grad, self.weight_decay = data_feeder, accum_grad, weight_decay
        self.iteration, self._audience = 0, audience_of(monitors)
        self._notifier, self._has_gradients = Notifier(), False
        self._exchange = GradientExchange(comm, grads, solver)
        # May replace functions of the graph: after all that may be refused.
        self._loss, self._reader = self._wrapped(loss)

    def update(self) -> UpdateResult:
        """Train on one batch, or on `accum_grad` of them; drop the update when gradients overflow."""
        if self._audience is not None and self._audience.begins():
            notify_beginning(self._audience, self.iteration + 1, self)
        self.solver.zero_grad()
        for _ in range(self.accum_grad):
            self.data_feeder()
            self.loss.forward(clear_no_need_grad=self.clear_buffer)
            self._reader.before_backward()
            self.loss.backward(self.scale, clear_buffer=self.clear_buffer)
        self._exchange.sum()
        self.iteration += 1
        loss = variable_of(self.loss)
        if self.drop_overflow_update and self.solver.check_inf_or_nan_grad():
            result = UpdateResult(False, self.scale, 0, "overflow")
            if self._audience is not None:
                # Layers are not looked at one by one here.
                cause = "overflow" if np.isfinite(loss.d).all() else "nonfinite_loss"
                self._audience.tell(Overflowed(self.iteration, 0, cause, (), "", self.scale))
                self._audience.tell(BatchThrownAway(self.iteration, cause, (), self.accum_grad))
        else:
            reason = self._reason()
            self.solver.scale_grad(1.0 / self.scale)
            if self.weight_decay is not None:
                self.solver.weight_decay(self.weight_decay)
            self.solver.update()
            result = UpdateResult(True, self.scale, 0, reason)
        if self._audience is not None:
            notify_update(self._audience, self.iteration, result, loss)
        return result

    def _reason(self) -> str:
        """`"zero_gradients"` until a gradient is not zero for the first time; from then on `"updated"`."""
        if not self._has_gradients:
            self._has_gradients = any(v.g.any() for v in self.solver.get_parameters().values())
        if self._has_gradients:
            return "updated"
        loss = variable_of(self.loss)
        self._notifier.notify_zero_gradients(0, self.iteration, self.scale, lambda: not loss.d.any())
        return "zero_gradients"

    @property
    def loss(self) -> LossLike:
        """The loss that is trained on; assign another for a graph that changes between iterations."""
        return self._loss

    @loss.setter
    def loss(self, loss: LossLike) -> None:
        if loss is self._loss or loss is variable_of(self._loss):
            return
        wrapped, reader = self._wrapped(loss)
        reader.go_on_from(self._reader)
        if isinstance(self._loss, FormatEmulation) and isinstance(wrapped, FormatEmulation):
            wrapped.go_on_from(self._loss)
        self._loss, self._reader = wrapped, reader

    def _wrapped(self, loss: LossLike) -> Tuple[LossLike, TailReader]:
        variable = variable_of(loss)
        if variable.size != 1:
            raise ValueError(
                f"loss has shape {variable.shape}, not one element; reduce it with nnabla.functions.mean"
            )
        if isinstance(loss, AdaptiveLossScaling):
            raise TypeError(
                "loss is an AdaptiveLossScaling, which unscales by itself; give the loss that was wrapped in "
                "it, or train with AdaptiveLossScalingUpdater"
            )
        wrapped = with_storage(
            loss, self.storage, float_tail=self.float_tail, parameters=self.solver.get_parameters
        )
        reader = TailReader(variable, float_tail=self.float_tail)
        reader.read()
        return wrapped, reader
