# SPDX-License-Identifier: Apache-2.0
"""Fixed loss scaling: one scale that never changes, as a preset of the adaptive updater."""

from __future__ import annotations

import inspect
from typing import Any, Callable, Optional, Sequence

import nnabla as nn

from ..core.config import AdaLossConfig
from ..core.precision import StorageLike
from ..core.validation import boolean, explains_keywords
from ..engine import Outcome
from ..graph.loss import LossLike
from .adaptive import AdaptiveLossScalingUpdater
from .retries import UpdateResult
from .settings import Setting, keep_data

_PRESET: Any = {
    "scaling_factor": 1.0,
    "global_scale": "dynamic",
    "on_overflow": "next",
    "config": AdaLossConfig(loss_scale_method="fixed"),
    "max_retries": 0,
    "on_nonfinite_loss": "skip",
    "on_nonfinite_forward": "skip",
    "on_scale_floor": "skip",
}
_SHARED = inspect.signature(AdaptiveLossScalingUpdater).parameters


class FixedLossScalingUpdater(AdaptiveLossScalingUpdater):
    """Trains with one constant loss scale; a batch whose gradients overflow is dropped.

    An `AdaptiveLossScalingUpdater` with `global_scale="dynamic"`, `scaling_factor=1.0`, `on_overflow="next"`,
    `max_retries=0`, the method `"fixed"` and all policies `"skip"`: every gradient has the scale. A dropped
    batch does not change running statistics. Each batch of `accum_grad` is unscaled before it is added, and
    in half precision so is each function's contribution to a weight that several functions use. Other
    arguments are those of `AdaptiveLossScalingUpdater`.

    Args:
        scale: the loss scale. 128.0, the usual first try for fp16.
        drop_overflow_update: drop the update when a gradient is not finite; False updates with it.

    All of these are attributes as well, as those of an `AdaptiveLossScalingUpdater` are.

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
        self.drop_overflow_update = drop_overflow_update
        arguments = {name: value for name, value in locals().items() if name in _SHARED}
        super().__init__(**arguments, **_PRESET)

    def _lose_batches(self, outcome: Outcome) -> UpdateResult:
        """Drop the batches of an update (`drop_overflow_update`): no other scale is tried."""
        self._undo_batches()
        # Every rank takes part, and counts the same cause. Lowered scales decide nothing here: S0 stays.
        verdict, _ = self._exchange.agree(outcome, repeat=False)
        self._count_lost(verdict, outcome)
        cause = f"gradients overflowed at the fixed scale {self.scale:g}; first bad layer: {outcome.where}"
        if verdict.of_forward:
            cause = f"forward is not finite: {outcome.fault}"
        advice = "; take a smaller scale, or AdaptiveLossScalingUpdater, which needs none"
        self._notifier.note_lost_batch(self.iteration, cause, advice)
        self._retries.last = outcome
        return self._skipped("skip", verdict.value if verdict.of_forward else "overflow")
