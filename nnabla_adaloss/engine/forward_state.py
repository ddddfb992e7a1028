# SPDX-License-Identifier: Apache-2.0
"""What forward leaves behind in parameters, such as running statistics: kept, so that it can be undone."""

from __future__ import annotations

from typing import Dict, List, Optional, Set

import nnabla as nn

from ..graph.plan import GraphPlan
from ..kernels import Kernels
from ..kernels.arrays import FLOAT16, FLOAT32, are_readable, stored_dtype
from .kept_arrays import Contents, contents_of
from .kept_data import KeptData


class ForwardState:
    """Parameters that forward writes: found by function and argument, and by what the first forward changes.

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
        self._batch: Dict[KeptData, KeptData] = {}
        self._examined: Set[int] = set()
        self._written: List[nn.Variable] = []
        self._candidates: List[nn.Variable] = []
        # The candidates as they were before the first forward; kept no longer than that.
        self._before: List[Contents] = []

    def drop(self) -> None:
        """Forget what is kept: the batch before is over."""
        self._held.clear()

    def save(self, plan: GraphPlan) -> None:
        """Keep what forward through `plan` is going to write, besides what is kept already for this batch."""
        if plan is not self._plan:
            self._find(plan)
        for keeper in self._present:
            if keeper not in self._held:
                keeper.save()
                self._held.append(keeper)
        if self._candidates:
            self._before = [contents_of(leaf.data) for leaf in self._candidates]

    def note_changes(self) -> None:
        """Look what forward has written besides, if that is not known yet; it is kept from now on."""
        if not self._candidates:
            return
        for leaf, before in zip(self._candidates, self._before):
            now = contents_of(leaf.data)
            if (None if now is None else now.tobytes()) == (None if before is None else before.tobytes()):
                continue
            self._written.append(leaf)
            keeper = self._keep([leaf])
            keeper.put([before])
            self._held.append(keeper)
        self._examined.update(map(hash, self._candidates))
        self._candidates, self._before = [], []

    def restore(self) -> None:
        """Put everything back that was kept."""
        # Of what was kept with two graphs of the batch, what was there first is there in the end.
        for keeper in reversed(self._held):
            keeper.restore()

    def save_batch(self) -> None:
        """Keep what was written so far, besides, for one batch of several that may be repeated."""
        before, self._batch = self._batch, {}
        for held in self._held:
            own = before.get(held) or KeptData(self._kernels, held.variables)
            own.save()
            self._batch[held] = own

    def restore_batch(self) -> None:
        """Put back what `save_batch` kept."""
        for held in self._held:
            if held in self._batch:
                self._batch[held].restore()

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

    def _find(self, plan: GraphPlan) -> None:
        self._plan = plan
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
