# SPDX-License-Identifier: Apache-2.0
"""Undoing batches, and state that forward writes, such as running statistics: found, saved and restored."""

from __future__ import annotations

from typing import Callable, Dict, List, Optional, Sequence, Tuple

import nnabla as nn

from ..graph.graph import Graph
from ..graph.plan import GraphPlan
from ..kernels import Kernels
from ..kernels.arrays import are_readable, is_readable
from .shared_memory import SharedMemory
from .snapshot import ArraySnapshot, Contents, contents_of, put_back

Moment = Dict[ArraySnapshot, ArraySnapshot]
"""State at a later moment: for each snapshot of the window's start, one taken at that moment."""


class ForwardState:
    """Leaves that forward writes, except fed data, saved once per window: the batches of an update."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._graph: Optional[Graph] = None
        # Leaves that forward writes in the present graph, by key.
        self.written: Dict[int, nn.Variable] = {}
        # Of parameters, in any graph: True if forward writes it, False if it was seen to leave it unchanged.
        self._parameters: Dict[int, bool] = {}
        # Carried leaves share the memory of an output that overwrites them, as after `h0.data = h.data`. Each
        # batch looks for them, as sharing may begin and end.
        self._shared: SharedMemory
        # Snapshots that this window has saved, and earlier ones, for their memory.
        self._saved: List[ArraySnapshot] = []
        self._unused: List[ArraySnapshot] = []
        # Parameters that the first forward may turn out to write, with their contents before it.
        self.candidates: List[nn.Variable] = []
        self._before: List[Tuple[nn.Variable, Contents]] = []

    def drop(self) -> None:
        """Drop the saved state, at the start of a window."""
        # In this order, as a signal may interrupt: no snapshot may be used twice in a window.
        saved, self._saved, self._before = self._saved, [], []
        self._unused[:0] = saved

    def save(self, graph: Graph, plan: GraphPlan) -> None:
        """Save the leaves that forward through `graph` will write, unless this window has saved them."""
        if graph is not self._graph:
            self._find(graph, plan)
        outputs, carried = self._shared.find()
        for leaf in carried:
            if leaf.data.clear_called:
                raise RuntimeError(
                    f"an input of shape {leaf.shape} shares its data with an output that clear_buffer has "
                    "freed, so its values are lost: share the data before the first update, or set "
                    "persistent = True of the output, and assign the input its initial value"
                )
        # Keep `clear_buffer` from freeing these.
        for output in outputs:
            output.persistent = True
        leaves = {**self.written, **{hash(leaf): leaf for leaf in carried}} if carried else self.written
        saved = {hash(leaf) for snapshot in self._saved for leaf in snapshot.variables}
        unsaved = [leaf for key, leaf in leaves.items() if key not in saved]
        if unsaved:
            snapshot = self._unused.pop(0) if self._unused else ArraySnapshot(self._kernels)
            snapshot.variables = unsaved
            snapshot.save()
            self._saved.append(snapshot)
        if self.candidates:
            self._before = [(leaf, contents_of(leaf.data)) for leaf in self.candidates]

    def note_changes(self) -> None:
        """After the first forward, find the parameters that it changed; they are saved from now on."""
        changed = self._changed()
        leaves = {hash(leaf): leaf for leaf, _ in changed}
        self.written.update(leaves)
        self._parameters.update({key: key in leaves for key in map(hash, self.candidates)})
        snapshot = ArraySnapshot(self._kernels, list(leaves.values()))
        snapshot.put([before for _, before in changed])
        self._saved.append(snapshot)
        self.candidates, self._before = [], []

    def restore(self, moment: Optional[Moment] = None) -> None:
        """Restore the state of a moment, by default that at the window's start."""
        # An interrupted first forward may have written any candidate.
        for leaf, before in self._changed():
            put_back(leaf.data, before)
        self._before = []
        # In reverse: the oldest snapshot wins where `note_changes` has saved a carried leaf again.
        for snapshot in reversed(self._saved):
            (moment or {}).get(snapshot, snapshot).restore()

    def now(self) -> Moment:
        """Save the present state, too, for a later batch of a window."""
        moment = {saved: ArraySnapshot(self._kernels, saved.variables) for saved in self._saved}
        for snapshot in moment.values():
            snapshot.save()
        return moment

    @property
    def arrays(self) -> List[nn.NdArray]:
        """The present float32 and float16 arrays that forward writes."""
        arrays = [leaf.data for leaf in self.written.values()]
        # Usually all are: one check is faster than one for each, of two per batch normalization in each pass.
        return arrays if are_readable(arrays) else list(filter(is_readable, arrays))

    def _changed(self) -> List[Tuple[nn.Variable, Contents]]:
        """Candidates that the first forward changed, with their contents before it."""

        def bits(contents: Contents) -> Optional[bytes]:
            return None if contents is None else contents.tobytes()

        return [(leaf, old) for leaf, old in self._before if bits(old) != bits(contents_of(leaf.data))]

    def _find(self, graph: Graph, plan: GraphPlan) -> None:
        """Find the leaves that forward writes, and `candidates`."""
        self._shared = SharedMemory(graph, plan)
        # nnabla does not see that later functions read these, as leaves, and may free them before.
        for position in plan.memory_uses.cut_off:
            graph.variables[position].persistent = True
        self.written, self.candidates = {}, []
        for position, writer in plan.state_leaves.items():
            leaf, key = graph.leaves[position], graph.keys[position]
            is_parameter = key in plan.names
            if writer is not None or self._parameters.get(key):
                self.written[key] = leaf
                if is_parameter:
                    self._parameters[key] = True
            elif is_parameter and key not in self._parameters:
                self.candidates.append(leaf)
        # Assigned last: a signal may interrupt between any two lines.
        self._graph = graph


class BatchGuard:
    """Undoes a batch, around whose forward `begin_batch` and `before_backward` are called, or a window."""

    def __init__(
        self,
        graph: Callable[[], Tuple[Graph, GraphPlan]],
        kernels: Kernels,
        state: Optional[ForwardState] = None,
    ) -> None:
        # Losses of one network may share the state that their forward passes write.
        self.state = state or ForwardState(kernels)
        self._graph = graph
        self._first = True  # True for the first batch of the window
        self._start: Moment = {}  # state at the start of a later batch
        # Gradients at the start of the window (True), and of a later batch (False), if they are saved.
        self._gradients = {first: ArraySnapshot(kernels) for first in (True, False)}
        # True if gradients are to be saved for this batch; and if they were, so that it can be undone.
        self._saves_gradients = self.can_undo_batch = False

    def begin(self) -> None:
        """Begin a window: drop the state saved for the previous one."""
        self.state.drop()
        self._gradients[True].put(())
        self._saves_gradients = self.can_undo_batch = False

    def undo_window(self) -> None:
        """Restore the state at the start of the window, gradients included if they were saved."""
        self.state.restore()
        self._gradients[True].restore()

    def begin_batch(self, *, first: bool, repeat: bool = True) -> None:
        """Before forward, save the state that the batch changes, and leaf gradients if it may be repeated."""
        self.state.save(*self._graph())
        self._first, self._saves_gradients = first, repeat
        self._start = {} if first else self.state.now()

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
        self.state.restore(self._start)

    def undo_batch(self) -> None:
        """Restore the state at the start of the batch, so that it can be repeated."""
        self.rewind()
        if self.can_undo_batch:
            self._gradients[self._first].restore()
