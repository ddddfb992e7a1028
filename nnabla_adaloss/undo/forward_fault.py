# SPDX-License-Identifier: Apache-2.0
"""The first infinity or NaN of a forward pass, which no loss scale can prevent."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional

import nnabla as nn
import numpy as np

from ..emulation.rounded_storage import RoundedStorage
from ..graph.loss import LossLike
from ..graph.plan import GraphPlan
from ..kernels import Kernels
from ..kernels.arrays import FLOAT16, FLOAT32, stored_dtype


class ForwardFault(NamedTuple):
    """The first function of a forward pass that read or computed an infinity or a NaN."""

    function: str
    type_name: str
    what: str  # what is wrong, in words

    def __str__(self) -> str:
        return f"{self.function} ({self.type_name}) {self.what}"


def find_forward_fault(
    loss: LossLike, plan: GraphPlan, kernels: Kernels, storage: Optional[RoundedStorage]
) -> Optional[ForwardFault]:
    """Run forward once more and return its first fault; None when everything is finite."""
    found: List[ForwardFault] = []

    def look(f: Any) -> None:
        if not found:
            fault = _fault_of(f, plan, kernels, storage)
            if fault is not None:
                found.append(fault)

    loss.forward(clear_no_need_grad=True, function_post_hook=look)
    return found[0] if found else None


def _fault_of(
    f: Any, plan: GraphPlan, kernels: Kernels, storage: Optional[RoundedStorage]
) -> Optional[ForwardFault]:
    def fault(what: str) -> ForwardFault:
        return ForwardFault(plan.labels.get(hash(f), f.info.type_name), f.info.type_name, what)

    for v in f.inputs:
        bad = 0 if v.parent is not None else _nonfinite(v, kernels)
        if bad:
            name = plan.names.get(hash(v))
            which = f"an input of shape {v.shape}" if name is None else f"the parameter {name}"
            return fault(f"reads {which} that holds {bad} infinities or NaNs")
    for v in f.outputs:
        bad = _nonfinite(v, kernels)
        if bad:
            rounded = None if storage is None else storage.data_rounding(hash(v))
            if storage is None or rounded is None or not rounded.overflowed:
                return fault(f"computes {bad} infinities or NaNs from finite inputs")
            stored = storage.data_format(hash(v), v.size)
            return fault(
                f"computes {rounded.overflowed} numbers beyond {stored.name}, which ends at {stored.max:g}"
            )
    return None


def _nonfinite(v: nn.Variable, kernels: Kernels) -> int:
    # Functions without gradients may have had their inputs freed.
    stored = None if v.data.clear_called else stored_dtype(v.data)
    if stored is None:
        return 0
    if stored in (FLOAT32, FLOAT16):
        return kernels.statistics(v.data).nonfinite
    # What was assigned as float64 stays so until it is read; integers are finite.
    return int(np.count_nonzero(~np.isfinite(v.data.data))) if stored.kind == "f" else 0
