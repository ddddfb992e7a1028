# SPDX-License-Identifier: Apache-2.0
"""Undoing of single batches, and of windows of them."""

from __future__ import annotations

from typing import Callable, Optional, Sequence, Tuple

import nnabla as nn

from ..graph.graph import Graph
from ..graph.plan import GraphPlan
from ..kernels import Kernels
from .forward_state import ForwardState, Moment
from .snapshot import ArraySnapshot


class BatchGuard:
    """Undoes batches; per window `begin`; per batch `begin_batch`, forward and backward."""

    def __init__(
        self,
        graph: Callable[[], Tuple[Graph, GraphPlan]],
        kernels: Kernels,
        state: Optional[ForwardState] = None,
    ) -> None:
        self.state = ForwardState(kernels) if state is None else state
        self._graph = graph
        # Whether the batch is the first of the window, and if not, the state when it began.
        self._first = True
        self._start: Moment = {}
        self._saves_gradients = self.can_undo_batch = self._can_undo_window = False
        # Gradients when the first batch of the window began, and when another one did, by `_first`.
        self._gradients = {first: ArraySnapshot(kernels) for first in (True, False)}

    def begin(self) -> None:
        """Begin a window: forget what was saved of the one before."""
        self.state.drop()
        self._first, self._saves_gradients = True, False
        self.can_undo_batch = self._can_undo_window = False

    def undo_window(self) -> None:
        self.state.restore()
        if self._can_undo_window:
            self._gradients[True].restore()

    def begin_batch(self, *, first: bool, repeat: bool = True) -> None:
        """Before forward, save what a batch will change; with its leaf gradients where it may be repeated."""
        self.state.save(*self._graph())
        self._first, self._saves_gradients = first, repeat
        # What forward writes is saved already for the first batch of a window.
        if not first:
            self._start = self.state.now(self._start)

    def before_backward(self, gradients: Sequence[nn.NdArray], *, all_zero: bool) -> None:
        """Note what forward has written; save leaf gradients if that is asked for, or all are lazily zero."""
        if self.state.candidates:
            self.state.note_changes()
        # Nothing has to be saved of zeros.
        self.can_undo_batch = self._saves_gradients or all_zero
        if self.can_undo_batch:
            self._gradients[self._first].save(gradients, all_zero=all_zero)
            self._can_undo_window = self._can_undo_window or self._first

    def rewind(self) -> None:
        """Restore what forward has written since the batch began, so that it can run on it once more."""
        self.state.restore({} if self._first else self._start)

    def undo_batch(self) -> None:
        """Restore everything as it was when the batch began, for it to be repeated."""
        self.rewind()
        if self.can_undo_batch:
            self._gradients[self._first].restore()
