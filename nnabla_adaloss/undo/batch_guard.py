# SPDX-License-Identifier: Apache-2.0
"""Undoing a single batch, or a window of batches."""

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
        # True if the batch is the first of the window; the state at the start of any other.
        self._first = True
        self._start: Moment = {}
        self._saves_gradients = self.can_undo_batch = False
        # Gradients at the start of the first batch of the window, if saved, and of another one, by `_first`.
        self._gradients = {first: ArraySnapshot(kernels) for first in (True, False)}

    def begin(self) -> None:
        """Begin a window: drop the state saved for the previous one."""
        self.state.drop()
        self._gradients[True].put(())
        self._first, self._saves_gradients, self.can_undo_batch = True, False, False

    def undo_window(self) -> None:
        """Restore the state at the start of the window, gradients included if they were saved."""
        self.state.restore()
        self._gradients[True].restore()

    def begin_batch(self, *, first: bool, repeat: bool = True) -> None:
        """Before forward, save the state that the batch changes, and leaf gradients if it may be repeated."""
        self.state.save(*self._graph())
        self._first, self._saves_gradients = first, repeat
        # The window's saved state serves its first batch, too.
        if not first:
            self._start = self.state.now(self._start)

    def before_backward(self, gradients: Sequence[nn.NdArray], *, all_zero: bool) -> None:
        """Find the leaves written by forward; save leaf gradients if requested or all lazily zero."""
        if self.state.candidates:
            self.state.note_changes()
        # Saving zeros costs nothing.
        self.can_undo_batch = self._saves_gradients or all_zero
        if self.can_undo_batch:
            self._gradients[self._first].save(gradients, all_zero=all_zero)

    def rewind(self) -> None:
        """Restore the leaves written by forward since the batch began, so that it can run again."""
        self.state.restore({} if self._first else self._start)

    def undo_batch(self) -> None:
        """Restore the state at the start of the batch, so that it can be repeated."""
        self.rewind()
        if self.can_undo_batch:
            self._gradients[self._first].restore()
