# SPDX-License-Identifier: Apache-2.0
"""What forward leaves behind in parameters, such as running statistics: kept, so that it can be undone."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Set

import nnabla as nn
import numpy as np
from numpy.typing import NDArray

from ..graph.plan import GraphPlan
from ..kernels import Kernels
from ..kernels.arrays import FLOAT16, FLOAT32, are_readable, stored_dtype
from ..kernels.copies import copy_arrays


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
        self._copies: Dict[int, nn.NdArray] = {}
        self._held: Dict[int, nn.Variable] = {}
        self._batch: Dict[int, nn.NdArray] = {}
        self._examined: Set[int] = set()
        self._written: List[nn.Variable] = []
        self._candidates: List[nn.Variable] = []
        # The candidates as they were before the first forward; kept no longer than that.
        self._before: List[Optional[NDArray[Any]]] = []

    def drop(self) -> None:
        """Forget what is kept: the batch before is over."""
        self._held.clear()

    def save(self, plan: GraphPlan) -> None:
        """Keep what forward through `plan` is going to write, besides what is kept already for this batch."""
        if plan is not self._plan:
            self._find(plan)
        if not self._written and not self._candidates:
            return
        new = {hash(leaf): leaf for leaf in self._written if hash(leaf) not in self._held}
        copy_arrays(self._kernels, [(leaf.data, self._copies[key]) for key, leaf in new.items()])
        self._held.update(new)
        self._before = [_contents(leaf) for leaf in self._candidates]

    def note_changes(self) -> None:
        """Look what forward has written besides, if that is not known yet; it is kept from now on."""
        if not self._candidates:
            return
        for leaf, before in zip(self._candidates, self._before):
            now = _contents(leaf)
            if (None if now is None else now.tobytes()) == (None if before is None else before.tobytes()):
                continue
            self._note(leaf)
            copy = self._copies[hash(leaf)]
            if before is None:
                copy.zero()
            else:
                copy.data = before
            self._held[hash(leaf)] = leaf
        self._examined.update(map(hash, self._candidates))
        self._candidates, self._before = [], []

    def restore(self) -> None:
        """Put everything back that was kept."""
        kept = [(self._copies[key], leaf.data) for key, leaf in self._held.items()]
        copy_arrays(self._kernels, kept)

    def save_batch(self) -> None:
        """Keep what was written so far, besides, for one batch of several that may be repeated."""
        for key, leaf in self._held.items():
            self._batch.setdefault(key, nn.NdArray(leaf.shape))
        copy_arrays(self._kernels, [(leaf.data, self._batch[key]) for key, leaf in self._held.items()])

    def restore_batch(self) -> None:
        """Put back what `save_batch` kept."""
        kept = [(self._batch[key], leaf.data) for key, leaf in self._held.items() if key in self._batch]
        copy_arrays(self._kernels, kept)

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
        self._plan, self._written, self._candidates = plan, [], []
        seen: Set[int] = set()
        for leaf, written in plan.fixed_leaves:
            key = hash(leaf)
            if key in seen:
                continue
            if written or key in self._copies:
                self._note(leaf)
            elif key in plan.names and key not in self._examined:
                self._candidates.append(leaf)
            else:
                continue
            seen.add(key)

    def _note(self, leaf: nn.Variable) -> None:
        self._copies.setdefault(hash(leaf), nn.NdArray(leaf.shape))
        self._written.append(leaf)


def _contents(leaf: nn.Variable) -> Optional[NDArray[Any]]:
    return None if leaf.data.zeroing else np.array(leaf.data.data)
