# SPDX-License-Identifier: Apache-2.0
"""Search for the first function of a forward pass that is not finite."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import nnabla as nn
import numpy as np

from ..graph.description import type_name_of
from ..graph.loss import LossLike
from ..graph.plan import GraphPlan
from ..kernels import Kernels, measurements_by
from ..kernels.arrays import FLOAT16, FLOAT32, is_readable, stored_dtype
from ..undo.snapshot import ArraySnapshot
from .prepared_graph import PreparedGraph

# In float16 a much smaller epsilon is 0. The reciprocal of this one, its smallest normal number, is in range.
_DIVISION = " (keep what it divides by away from 0 by 2**-14 or more)"
_ADVICE = {
    "Log": " (keep what it reads away from 0 by 2**-14 or more, or use F.log_softmax)",
    "Div2": _DIVISION,
    "RDivScalar": _DIVISION,
}


def find_fault(loss: LossLike, prepared: PreparedGraph, rewind: Callable[[], None]) -> str:
    """Run forward, which `rewind` undoes; describe the first function with a nonfinite array, else ""."""
    graph, plan, kernels = prepared.graph, prepared.plan, prepared.kernels
    rewind()
    first = 0  # index, by time of execution, of the first function to examine
    if kernels.asynchronous:
        # Examining a function waits for the device: a first forward, with one wait, finds where to begin.
        # `rewind` undoes that forward only during a batch of an updater: the snapshot does otherwise.
        written = [graph.leaves[p] for p, writer in plan.state_leaves.items() if writer is not None]
        snapshot = ArraySnapshot(kernels, written)
        snapshot.save()
        nonfinite = _first_nonfinite(loss, prepared)
        if nonfinite is None:
            return ""
        first = nonfinite
        snapshot.restore()
        rewind()
    # Leaves that forward may write, such as running statistics.
    state = {graph.keys[position] for position in plan.state_leaves}
    # Finite state that the running function reads: nonfinite numbers there afterwards are written by it.
    finite_state: List[nn.Variable] = []
    # Leaves in fp32: while the graph runs, rounded copies replace some.
    leaves = {graph.keys[position]: v.data for position, v in graph.leaves.items()}
    fault, run = "", 0  # run: number of functions that have run

    def before(f: Any) -> None:
        if run >= first and not fault:
            finite_state[:] = [v for v in f.inputs if hash(v) in state and not _count_nonfinite(v, kernels)]

    def after(f: Any) -> None:
        nonlocal fault, run
        if run >= first and not fault:
            description = _fault(f, prepared, finite_state, leaves)
            if description:
                label, kind = plan.labels[graph.numbers[hash(f)]], type_name_of(f.info.type_name)
                fault = f"{label} ({kind}) {description}"
        run += 1

    loss.forward(clear_no_need_grad=True, function_pre_hook=before, function_post_hook=after)
    return fault


def _first_nonfinite(loss: LossLike, prepared: PreparedGraph) -> Optional[int]:
    """Run forward; return the index, by time of execution, of the first function with a nonfinite array."""
    kernels = prepared.kernels
    # Own measurements: fetching the engine's would remove results of a pass. One fetch waits once for a GPU.
    measurements = measurements_by(kernels, len(prepared.graph.variables))
    # Of each function: True if an unreadable array is not finite; and tickets of its other arrays.
    measured: List[Tuple[bool, List[int]]] = []

    def measure(f: Any) -> None:
        # Inputs with a parent were measured as outputs. Kernels cannot read float64, as assigned to an input,
        # nor arrays that no function has written.
        variables = [v for v in f.inputs if v.parent is None and not v.data.clear_called] + f.outputs
        unreadable = [v for v in variables if not is_readable(v.data)]
        tickets = measurements.measure([v.data for v in variables if v not in unreadable])
        measured.append((any(_count_nonfinite(v, kernels) for v in unreadable), tickets))

    loss.forward(clear_no_need_grad=True, function_post_hook=measure)
    statistics = measurements.fetch().statistics
    nonfinite = (bad or any(statistics[ticket].nonfinite for ticket in tickets) for bad, tickets in measured)
    return next((index for index, bad in enumerate(nonfinite) if bad), None)


def _fault(
    f: Any, prepared: PreparedGraph, finite_state: Sequence[nn.Variable], leaves: Dict[int, nn.NdArray]
) -> str:
    """Describe the first nonfinite array of a function that has run; `finite_state` was finite before it."""
    plan, kernels, storage = prepared.plan, prepared.kernels, prepared.storage
    for v in f.inputs:
        # Inputs with a parent are outputs of functions that were examined before.
        if v.parent is None and v not in finite_state and (bad := _count_nonfinite(v, kernels)):
            beyond = _beyond(v, leaves[hash(v)], prepared)
            return f"reads {_name_of(v, plan)} that {beyond or f'holds {_in_words(bad)}'}{_where(v)}"
    for v in f.outputs:
        if bad := _count_nonfinite(v, kernels):
            for w in f.inputs:
                # An output in fp32, as in the float tail, is rounded when it is read.
                if w.parent is not None and (beyond := _beyond(w, w.data, prepared)):
                    label = plan.labels[prepared.graph.numbers[hash(w.parent)]]
                    return f"reads the output of {label} that {beyond}"
            rounded, stored = storage.data.get(hash(v)), storage.data_format(hash(v), v.size)
            if rounded is not None and stored is not None and rounded.overflowed:
                numbers = "1 number" if rounded.overflowed == 1 else f"{rounded.overflowed} numbers"
                return f"computes {numbers} beyond {stored.name}, which ends at {stored.max:g}{_where(v)}"
            advice = _ADVICE.get(f.info.type_name, "")
            return f"computes {_in_words(bad)} from finite inputs{_where(v)}{advice}"
    for v in finite_state:
        if bad := _count_nonfinite(v, kernels):
            return f"writes {_in_words(bad)} to {_name_of(v, plan)} from finite inputs{_where(v)}"
    return ""


def _beyond(v: nn.Variable, exact: nn.NdArray, prepared: PreparedGraph) -> str:
    """Describe the largest number of a finite array, `exact`, of which storage makes infinities; else ""."""
    rounded, stored = prepared.storage.data.get(hash(v)), prepared.storage.data_format(hash(v), v.size)
    if rounded is None or stored is None or not rounded.overflowed or not is_readable(exact):
        return ""
    seen = prepared.kernels.statistics(exact)
    limit = f"beyond {stored.name}, which ends at {stored.max:g}"
    return f"reaches {seen.abs_max:g}, {limit}" if seen.finite else ""


def _name_of(v: nn.Variable, plan: GraphPlan) -> str:
    name = plan.names.get(hash(v))
    return f"an input of shape {v.shape}" if name is None else f"the parameter {name}"


def _in_words(nonfinite: int) -> str:
    return "1 infinity or NaN" if nonfinite == 1 else f"{nonfinite} infinities or NaNs"


def _where(v: nn.Variable) -> str:
    """Describe the index of the first nonfinite element, which shows the sample of the batch."""
    if v.size == 1:
        return ""
    first = np.argwhere(~np.isfinite(v.data.get_data("r")))[0]
    return f", the first at [{', '.join(map(str, first))}]"


def _count_nonfinite(v: nn.Variable, kernels: Kernels) -> int:
    """Count the infinities and NaNs in a Variable's data; 0 if they were freed or never written."""
    # Forward frees inputs that backward does not read.
    stored = None if v.data.clear_called else stored_dtype(v.data)
    if stored is None:
        return 0
    if stored in (FLOAT32, FLOAT16):
        return kernels.statistics(v.data).nonfinite
    # NumPy arrays assigned to an input may be float64 or integers, which are finite.
    return int(np.count_nonzero(~np.isfinite(v.data.data))) if stored.kind == "f" else 0
