# SPDX-License-Identifier: Apache-2.0
"""Undoes single batches, and finds out what was wrong with them or whether they had any gradient."""

from __future__ import annotations

from typing import Callable, Iterable, Optional, Sequence

import nnabla as nn

from ..emulation.rounded_storage import RoundedStorage
from ..graph.loss import LossLike, variable_of
from ..graph.plan import GraphPlan
from ..kernels import Kernels
from ..kernels.arrays import FLOAT16, FLOAT32, stored_dtype
from .forward_fault import ForwardFault, find_forward_fault
from .forward_state import ForwardState, Moment
from .snapshot import ArraySnapshot


class BatchGuard:
    """Undoes single batches, and answers a training loop's questions about the present one. Per window
    `begin`, then per batch `begin_batch`, forward, `state.note_changes` and backward.
    """

    def __init__(
        self,
        loss: LossLike,
        plan: Callable[[], GraphPlan],
        kernels: Kernels,
        storage: Optional[RoundedStorage],
        state: Optional[ForwardState] = None,
    ) -> None:
        self.state = ForwardState(kernels) if state is None else state
        self._loss = loss
        self._plan = plan
        self._kernels = kernels
        self._storage = storage
        # Whether the batch is the first of the window, and if not, the state when it began.
        self._first = True
        self._start: Moment = {}
        self._saves_gradients = self.can_undo_batch = False
        # Gradients when the first batch of the window began, and when a later one did.
        self._gradients_at_first, self._gradients = ArraySnapshot(kernels), ArraySnapshot(kernels)

    def go_on_from(self, before: BatchGuard) -> None:
        """Share the state that forward writes with the guard of another graph of the network."""
        self.state = before.state

    def begin(self) -> None:
        """Begin a window: forget what was saved of the one before."""
        self.state.drop()
        self._gradients_at_first.drop()
        self._first, self._saves_gradients = True, False

    def undo_window(self) -> None:
        """Restore what forward has written in this window, and the gradients that were saved in it."""
        self.state.restore()
        self._gradients_at_first.restore()

    def begin_batch(self, *, first: bool, repeat: bool = True) -> None:
        """Before forward, save what one batch is going to change, unless the window has saved it; with its
        leaf gradients where it may be repeated.
        """
        self.state.save(self._plan())
        self._first, self._saves_gradients = first, repeat
        # What forward writes is saved already for the first batch of a window.
        if not first:
            self._start = self.state.now(self._start)

    def before_backward(self, gradients: Sequence[nn.NdArray], *, all_zero: bool) -> None:
        """Save leaf gradients if `begin_batch` has asked for that, or all are lazily zero."""
        # Nothing has to be saved of zeros.
        self.can_undo_batch = self._saves_gradients or all_zero
        if self.can_undo_batch:
            saved = self._gradients_at_first if self._first else self._gradients
            saved.save(gradients, all_zero=all_zero)

    def rewind(self) -> None:
        """Restore what forward has written since the batch began, so that it can run on it once more."""
        if self._first:
            self.state.restore()
        else:
            self.state.restore(self._start)

    def undo_batch(self) -> None:
        """Restore everything as it was when the batch began, for it to be repeated."""
        self.rewind()
        if self.can_undo_batch:
            (self._gradients_at_first if self._first else self._gradients).restore()

    @property
    def stored_nonfinite(self) -> bool:
        """Whether an emulated storage has seen data that was not finite in the last forward."""
        storage = self._storage
        return storage is not None and any(seen.statistics.nonfinite for seen in storage.data.values())

    def find_fault(self) -> Optional[ForwardFault]:
        """The first function that is not finite on the present inputs; forward runs once more for that."""
        self.rewind()
        return find_forward_fault(self._loss, self._plan(), self._kernels, self._storage)

    def gradients_are_zero(self, parameters: Iterable[nn.Variable]) -> bool:
        """True when no gradient holds anything but zeros; on a GPU each read waits for the device."""
        return all(map(self._is_zero, sorted(parameters, key=lambda v: v.size)))

    def loss_is_zero(self) -> bool:
        """True when the loss is zero, and was not rounded to zero by the storage."""
        loss = variable_of(self._loss)
        rounded = None if self._storage is None else self._storage.data_rounding(hash(loss))
        return not loss.d.any() and not (rounded is not None and rounded.underflowed)

    def _is_zero(self, parameter: nn.Variable) -> bool:
        stored = stored_dtype(parameter.grad)
        if stored is None:
            return True
        return stored in (FLOAT32, FLOAT16) and not self._kernels.statistics(parameter.grad).abs_max
