# SPDX-License-Identifier: Apache-2.0
"""Search for leaves that share memory with outputs of the same graph."""

from __future__ import annotations

from operator import attrgetter, itemgetter
from typing import List, Tuple

import nnabla as nn

from ..graph.graph import Graph
from ..graph.plan import GraphPlan

_references = attrgetter("get_number_of_references")

Use = Tuple[nn.Variable, int]
"""A variable, and the index of the function that reads or writes it."""


class SharedMemory:
    """Finds leaves that share memory with an output of the same graph, as after `h0.data = h.data`."""

    def __init__(self, graph: Graph, plan: GraphPlan) -> None:
        uses = plan.memory_uses
        self._reads: List[Use] = [(graph.variables[p], index) for p, index in uses.leaves.items()]
        self._writes: List[Use] = [(graph.variables[p], index) for p, index in uses.outputs.items()]
        self._variables = [v for v, _ in self._reads + self._writes]
        self._marks: List[nn.Variable] = []

    def find(self) -> Tuple[List[nn.Variable], List[nn.Variable]]:
        """Find outputs that share memory with leaves, and the leaves that these overwrite after a read."""
        # nnabla returns addresses only by allocating memory, but it counts the Python Variables that refer to
        # a memory. All that share it have the same count, which one more Variable for it, a mark, raises. The
        # garbage collector and other threads lower counts, but not within one call.
        for _ in range(8):  # again if other Variables were dropped meanwhile
            counts = list(map(_references, self._variables))
            of_leaves, of_outputs = counts[: len(self._reads)], counts[len(self._reads) :]
            common = set(of_leaves).intersection(of_outputs)
            if not common:
                return [], []
            reads = [read for read, count in zip(self._reads, of_leaves) if count in common]
            writes = _sharing(self._writes, reads)
            shared = _sharing(reads, writes)
            carried = _sharing(shared, _overwriting(shared, writes))
            if list(map(_references, self._variables)) == counts:
                break
        sharing = set(shared)
        # Kept, so that in the next search the counts of these leaves differ from those of outputs.
        self._marks += _marks([read for read in reads if read not in sharing])
        return [v for v, _ in writes], [v for v, _ in carried]


def _overwriting(reads: List[Use], writes: List[Use]) -> List[Use]:
    """List the `writes`, in forward order, to memory that the function itself or an earlier one has read."""
    counts_before, overwriting = _counts(writes), []
    marks = []  # of all reads so far: counts are higher as long as they exist
    reads_to_come = sorted(reads, key=itemgetter(1), reverse=True)
    for write, count_before in zip(writes, counts_before):
        variable, writer = write
        while reads_to_come and reads_to_come[-1][1] <= writer:
            marks += _marks([reads_to_come.pop()])
        if variable.get_number_of_references != count_before:
            overwriting.append(write)
    return overwriting


def _sharing(some: List[Use], others: List[Use]) -> List[Use]:
    """List those of `some` that share memory with one of `others`."""
    before, _marked = _counts(some), _marks(others)  # counts are higher as long as the marks exist
    return [use for use, count, then in zip(some, before, _counts(some)) if count != then]


def _counts(uses: List[Use]) -> List[int]:
    return [v.get_number_of_references for v, _ in uses]


def _marks(uses: List[Use]) -> List[nn.Variable]:
    """Make another Variable that refers to the memory of each."""
    return [v.get_unlinked_variable() for v, _ in uses]
