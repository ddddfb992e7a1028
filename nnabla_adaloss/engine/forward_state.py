# SPDX-License-Identifier: Apache-2.0
"""What forward leaves behind, such as running statistics or a recurrent state: kept, to be undone."""

from __future__ import annotations

from types import MappingProxyType
from typing import Dict, Iterator, List, Mapping, Optional, Set, Tuple

import nnabla as nn

from ..graph.plan import GraphPlan
from ..kernels import Kernels
from ..kernels.arrays import FLOAT16, FLOAT32, are_readable, stored_dtype
from .kept_arrays import Contents, contents_of
from .kept_data import KeptData
from .shared_arrays import SharedArrays

Moment = Dict[KeptData, KeptData]
"""What forward had written by some moment, by what keeps the same since the window began."""

_BEGINNING: Mapping[KeptData, KeptData] = MappingProxyType({})


class ForwardState:
    """Leaves that forward writes: found by function and argument, by what the first forward changes of
    parameters, and, before each forward, by the memory that they share with outputs.

    Inputs that a data feeder fills are not among them. It outlives graphs: what is known of a parameter is
    kept when a network is built again.

    Args:
        kernels: the kernels that copy.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._plan: Optional[GraphPlan] = None
        # By parameter what keeps it, together with others that were found with it; and those of the plan.
        self._keepers: Dict[int, KeptData] = {}
        self._present: List[KeptData] = []
        self._held: List[KeptData] = []
        # Of the plan: what may share memory with outputs, and what keeps those that did the last time.
        self._shared = SharedArrays([], [])
        self._carried = KeptData(kernels, [])
        self._examined: Set[int] = set()
        self._written: List[nn.Variable] = []
        self._candidates: List[nn.Variable] = []
        # The candidates as they were before the first forward; kept no longer than that.
        self._before: List[Contents] = []

    def drop(self) -> None:
        """Forget what is kept: the batch before is over."""
        self._held.clear()
        self._before = []

    def save(self, plan: GraphPlan) -> None:
        """Keep what forward through `plan` is going to write, besides what is kept already for this batch.

        An output that shares its memory with a leaf becomes persistent: `clear_buffer` must not free it.

        Raises:
            RuntimeError: it has freed it already.
        """
        if plan is not self._plan:
            self._find(plan)
        carried = self._carried_leaves()
        if carried != self._carried.variables:
            self._carried = KeptData(self._kernels, carried)
        for keeper in [*self._present, self._carried] if carried else self._present:
            if keeper not in self._held:
                keeper.save()
                self._held.append(keeper)
        if self._candidates:
            self._before = [contents_of(leaf.data) for leaf in self._candidates]

    def note_changes(self) -> None:
        """Look what forward has written besides, if that is not known yet; it is kept from now on."""
        if not self._candidates:
            return
        for leaf, before in self._changed():
            self._written.append(leaf)
            keeper = self._keep([leaf])
            keeper.put([before])
            self._held.append(keeper)
        self._examined.update(map(hash, self._candidates))
        self._candidates, self._before = [], []

    def restore(self, moment: Mapping[KeptData, KeptData] = _BEGINNING) -> None:
        """Put back everything as it was at a moment; as a rule, when the first forward of all began.

        What was met only since then is put back to where it was when it was met.
        """
        # After a forward that was interrupted, it is not known what all of it writes.
        for leaf, before in list(self._changed()):
            keeper = KeptData(self._kernels, [leaf])
            keeper.put([before])
            keeper.restore()
        self._before = []
        # Of what was kept with two graphs of the batch, what was there first is there in the end.
        for keeper in reversed(self._held):
            moment.get(keeper, keeper).restore()

    def now(self, reused: Mapping[KeptData, KeptData] = _BEGINNING) -> Moment:
        """What was written so far, kept besides, for one batch of several that may be repeated.

        Args:
            reused: an earlier moment, whose memory is used again.
        """
        moment: Moment = {}
        for held in self._held:
            moment[held] = reused.get(held) or KeptData(self._kernels, held.variables)
            moment[held].save()
        return moment

    @property
    def arrays(self) -> List[nn.NdArray]:
        """What forward writes, as it is now; the float32 and float16 of it."""
        if not self._written:
            return []
        arrays = [leaf.data for leaf in self._written]
        if are_readable(arrays):
            return arrays
        return [array for array in arrays if stored_dtype(array) in (FLOAT32, FLOAT16)]

    def has_nonfinite(self) -> bool:
        """True when something that forward writes holds an infinity or a NaN."""
        return bool(self._written) and not self._kernels.all_finite(self.arrays)

    def _changed(self) -> Iterator[Tuple[nn.Variable, Contents]]:
        """The candidates that are not what they were before the first forward, with what that was."""
        for leaf, before in zip(self._candidates, self._before):
            now = contents_of(leaf.data)
            if (None if now is None else now.tobytes()) != (None if before is None else before.tobytes()):
                yield leaf, before

    def _carried_leaves(self) -> List[nn.Variable]:
        """The leaves that share memory with outputs as things are now."""
        found = self._shared.find()
        for leaf, outputs in found:
            if leaf.data.clear_called:
                raise RuntimeError(
                    f"an input of shape {leaf.shape} shares its data with an output that clear_buffer has "
                    "freed, so that what it held is lost: share the data before the first update, or set "
                    "persistent = True of the output, and set the input to where it shall start"
                )
            for output in outputs:
                output.persistent = True
        return [leaf for leaf, _ in found]

    def _find(self, plan: GraphPlan) -> None:
        self._plan = plan
        self._shared = _shared_arrays(plan)
        known: Dict[KeptData, None] = {}
        new: Dict[int, nn.Variable] = {}
        candidates: Dict[int, nn.Variable] = {}
        leaves: Dict[int, nn.Variable] = {}
        for leaf, written in plan.fixed_leaves:
            key = hash(leaf)
            leaves[key] = leaf
            if key in self._keepers:
                known[self._keepers[key]] = None
            elif written:
                new[key] = leaf
            elif key in plan.names and key not in self._examined:
                candidates[key] = leaf
        self._present = list(known)
        self._written = [leaf for key, leaf in leaves.items() if key in self._keepers or key in new]
        self._candidates = [leaf for key, leaf in candidates.items() if key not in new]
        lasting = [leaf for key, leaf in new.items() if key in plan.names]
        if lasting:
            self._keep(lasting)
        passing = [leaf for key, leaf in new.items() if key not in plan.names]
        if passing:
            # No parameters: they may be gone with this graph.
            self._present.append(KeptData(self._kernels, passing))

    def _keep(self, leaves: List[nn.Variable]) -> KeptData:
        """What keeps these parameters from now on."""
        keeper = KeptData(self._kernels, leaves)
        self._keepers.update((hash(leaf), keeper) for leaf in leaves)
        self._present.append(keeper)
        return keeper


def _shared_arrays(plan: GraphPlan) -> SharedArrays:
    leaves = dict(plan.leaves)
    leaves.update((hash(leaf), leaf) for leaf, _ in plan.fixed_leaves)
    outputs = [plan.all_variables[p] for p in plan.structure.described.outputs.positions]
    # Parameters are many, and belong to the solver or to what the first forward is seen to change.
    return SharedArrays([leaf for key, leaf in leaves.items() if key not in plan.names], outputs)
