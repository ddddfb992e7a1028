# SPDX-License-Identifier: Apache-2.0
"""Looks at single batches: what they leave behind, what is wrong with them, whether they teach anything."""

from __future__ import annotations

from typing import Callable, Iterable, Optional

import nnabla as nn

from ..graph.loss_like import LossLike, variable_of
from ..graph.plan import GraphPlan
from ..kernels import Kernels
from ..kernels.arrays import FLOAT16, FLOAT32, stored_dtype
from .emulated_storage import EmulatedStorage
from .forward_fault import ForwardFault, find_forward_fault
from .forward_state import ForwardState, Moment
from .kept_gradients import KeptGradients
from .leaf_arrays import LeafArrays


class BatchGuard:
    """What a training loop asks about the batch it is working on.

    Args:
        loss: what forward is called on.
        plan: hands out the plan of the graph as it is now.
        kernels: the kernels that read and copy arrays.
        storage: an emulated storage, which knows what left its range; or None.
        state: what is known of parameters that forward writes, from the network's graph before; or None.

    Attributes:
        state: what is known of parameters that forward writes.
    """

    def __init__(
        self,
        loss: LossLike,
        plan: Callable[[], GraphPlan],
        kernels: Kernels,
        storage: Optional[EmulatedStorage],
        state: Optional[ForwardState] = None,
    ) -> None:
        self.state = ForwardState(kernels) if state is None else state
        self._loss = loss
        self._plan = plan
        self._kernels = kernels
        self._storage = storage
        # Whether the batch is the first since `begin`, and if not, what was written when it began.
        self._first = True
        self._began: Moment = {}
        self._keeps = False
        self._gradients = KeptGradients(kernels)

    def begin(self) -> None:
        """Forget what was kept of the batch before."""
        self.state.drop()
        self._first, self._keeps = True, False

    def before_forward(self) -> None:
        """Keep the running statistics and whatever else forward writes, before it does; besides what is kept
        already, of another graph of the same batch.
        """
        self.state.save(self._plan())

    def after_forward(self) -> None:
        """Look what forward has written, where that is not known yet."""
        self.state.note_changes()

    def undo(self) -> None:
        """Put back what forward has written since `begin` and `before_forward`: the batch leaves nothing
        behind.
        """
        self.state.restore()

    def begin_batch(self, *, first: bool, repeat: bool = True) -> None:
        """Keep what one batch is going to change: what forward writes, and leaf gradients for `undo_batch`.

        Args:
            first: whether it is the first since `begin`: then what forward writes is kept already.
            repeat: whether its gradients are kept.
        """
        self._first, self._keeps = first, repeat
        if not first:
            self._began = self.state.now(self._began)

    def before_backward(self, gradients: LeafArrays) -> None:
        """Keep the gradients of the graph's leaves, if `begin_batch` has asked for that."""
        if self._keeps:
            self._gradients.save(gradients)

    def rewind(self) -> None:
        """Put back what forward has written since the batch began: it can run on the same batch once more."""
        if self._first:
            self.state.restore()
        else:
            self.state.restore(self._began)

    def undo_batch(self) -> None:
        """Put back what was there when the batch began, for it to be repeated."""
        self.rewind()
        self._gradients.restore()

    def find_fault(self) -> Optional[ForwardFault]:
        """The first function that is not finite on what was fed last; forward runs once more for that."""
        self.rewind()
        return find_forward_fault(self._loss, self._plan(), self._kernels, self._storage)

    def gradients_are_zero(self, parameters: Iterable[nn.Variable]) -> bool:
        """True when no gradient of `parameters` holds anything but zeros.

        The smallest ones are looked at first. On a GPU each look waits for the device: call it when
        `AdaptiveLossScaling.nonzero_leaves`, which costs nothing, has shown none.
        """
        return all(map(self._is_zero, sorted(parameters, key=lambda v: v.size)))

    def loss_is_zero(self) -> bool:
        """True when the loss is zero, and was not made so by storing it."""
        loss = variable_of(self._loss)
        rounded = None if self._storage is None else self._storage.data_rounding(hash(loss))
        return not loss.d.any() and not (rounded is not None and rounded.underflowed)

    def _is_zero(self, parameter: nn.Variable) -> bool:
        stored = stored_dtype(parameter.grad)
        if stored is None:
            return True
        return stored in (FLOAT32, FLOAT16) and not self._kernels.statistics(parameter.grad).abs_max
