# SPDX-License-Identifier: Apache-2.0
"""Undoes single batches, and finds out what was wrong with them or whether they had any gradient."""

from __future__ import annotations

from typing import Any, Callable, Iterable, List, NamedTuple, Optional, Sequence

import nnabla as nn
import numpy as np

from ..emulation.rounded_storage import RoundedStorage
from ..graph.loss import LossLike, variable_of
from ..graph.plan import GraphPlan
from ..kernels import Kernels
from ..kernels.arrays import FLOAT16, FLOAT32, stored_dtype
from .forward_state import ForwardState, Moment
from .snapshot import ArraySnapshot


class ForwardFault(NamedTuple):
    """The first function of a forward pass that read or computed an infinity or a NaN: no scale helps."""

    function: str
    type_name: str
    what: str  # what is wrong, in words

    def __str__(self) -> str:
        return f"{self.function} ({self.type_name}) {self.what}"


class BatchGuard:
    """Undoes batches; per window `begin`; per batch `begin_batch`, forward, `note_changes` and backward."""

    def __init__(
        self,
        loss: LossLike,
        plan: Callable[[], GraphPlan],
        kernels: Kernels,
        storage: Optional[RoundedStorage],
        state: Optional[ForwardState] = None,
    ) -> None:
        self.state = ForwardState(kernels) if state is None else state
        self._loss, self._plan, self._kernels, self._storage = loss, plan, kernels, storage
        # Whether the batch is the first of the window, and if not, the state when it began.
        self._first = True
        self._start: Moment = {}
        self._saves_gradients = self.can_undo_batch = False
        # Gradients when the first batch of the window began, and when another one did, by `_first`.
        self._gradients = {first: ArraySnapshot(kernels) for first in (True, False)}

    def go_on_from(self, before: BatchGuard) -> None:
        """Share the state that forward writes with the guard of another graph of the network."""
        self.state = before.state

    def begin(self) -> None:
        """Begin a window: forget what was saved of the one before."""
        self.state.drop()
        self._gradients[True].drop()
        self._first, self._saves_gradients = True, False

    def undo_window(self) -> None:
        """Restore what forward has written in this window, and the gradients that were saved in it."""
        self.state.restore()
        self._gradients[True].restore()

    def begin_batch(self, *, first: bool, repeat: bool = True) -> None:
        """Before forward, save what a batch will change; with its leaf gradients where it may be repeated."""
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
            self._gradients[self._first].save(gradients, all_zero=all_zero)

    def rewind(self) -> None:
        """Restore what forward has written since the batch began, so that it can run on it once more."""
        self.state.restore({} if self._first else self._start)

    def undo_batch(self) -> None:
        """Restore everything as it was when the batch began, for it to be repeated."""
        self.rewind()
        if self.can_undo_batch:
            self._gradients[self._first].restore()

    @property
    def stored_nonfinite(self) -> bool:
        """Whether an emulated storage has seen data that was not finite in the last forward."""
        storage = self._storage
        return storage is not None and any(seen.statistics.nonfinite for seen in storage.data.values())

    def find_fault(self) -> Optional[ForwardFault]:
        """The first function that is not finite on the present inputs; forward runs once more for that."""
        self.rewind()
        plan = self._plan()
        found: List[ForwardFault] = []

        def look(f: Any) -> None:
            what = None if found else self._fault(f, plan)
            if what is not None:
                kind = f.info.type_name
                found.append(ForwardFault(plan.labels.get(hash(f), kind), kind, what))

        self._loss.forward(clear_no_need_grad=True, function_post_hook=look)
        return found[0] if found else None

    def gradients_are_zero(self, parameters: Iterable[nn.Variable]) -> bool:
        """True when no gradient holds anything but zeros; on a GPU each read waits for the device."""
        for parameter in sorted(parameters, key=lambda v: v.size):
            stored = stored_dtype(parameter.grad)
            if stored in (FLOAT32, FLOAT16):
                if self._kernels.statistics(parameter.grad).abs_max:
                    return False
            elif stored is not None:
                return False
        return True

    def loss_is_zero(self) -> bool:
        """True when the loss is zero, and was not rounded to zero by the storage."""
        loss = variable_of(self._loss)
        rounded = None if self._storage is None else self._storage.data.get(hash(loss))
        return not loss.d.any() and not (rounded is not None and rounded.underflowed)

    def _fault(self, f: Any, plan: GraphPlan) -> Optional[str]:
        """What is not finite around a function that has just run, in words."""
        for v in f.inputs:
            bad = 0 if v.parent is not None else self._nonfinite(v)
            if bad:
                name = plan.names.get(hash(v))
                which = f"an input of shape {v.shape}" if name is None else f"the parameter {name}"
                return f"reads {which} that holds {bad} infinities or NaNs"
        storage = self._storage
        for v in f.outputs:
            bad = self._nonfinite(v)
            if bad:
                rounded = None if storage is None else storage.data.get(hash(v))
                if storage is None or rounded is None or not rounded.overflowed:
                    return f"computes {bad} infinities or NaNs from finite inputs"
                stored = storage.data_format(hash(v), v.size)
                beyond = f"{rounded.overflowed} numbers beyond {stored.name}"
                return f"computes {beyond}, which ends at {stored.max:g}"
        return None

    def _nonfinite(self, v: nn.Variable) -> int:
        # Functions without gradients may have had their inputs freed.
        stored = None if v.data.clear_called else stored_dtype(v.data)
        if stored is None:
            return 0
        if stored in (FLOAT32, FLOAT16):
            return self._kernels.statistics(v.data).nonfinite
        # What was assigned as float64 stays so until it is read; integers are finite.
        return int(np.count_nonzero(~np.isfinite(v.data.data))) if stored.kind == "f" else 0
