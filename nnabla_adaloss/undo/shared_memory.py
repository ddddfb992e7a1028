# SPDX-License-Identifier: Apache-2.0
"""Search for leaves that share memory with outputs of the same graph."""

from __future__ import annotations

from operator import attrgetter, itemgetter
from typing import List, Sequence, Tuple

import nnabla as nn

from ..graph.graph import Graph
from ..graph.plan import GraphPlan

_references = attrgetter("get_number_of_references")

# Number of restarts of a search because other Variables were dropped meanwhile.
_ATTEMPTS = 8

Use = Tuple[nn.Variable, int]
"""A variable, and the index of the function that reads or writes it."""


class SharedMemory:
    """Finds leaves that share memory with an output of the same graph, as after `h0.data = h.data`."""

    def __init__(self, reads: Sequence[Use], writes: Sequence[Use]) -> None:
        self._reads, self._writes = reads, writes
        self._variables = [v for v, _ in [*reads, *writes]]
        self._marks: List[nn.Variable] = []

    def find(self) -> Tuple[List[nn.Variable], List[nn.Variable]]:
        """Find outputs that now share memory with a leaf, and leaves that are read, then so overwritten."""
        # nnabla returns addresses only by allocating memory, but it counts the Python Variables that refer to
        # a memory. All that share it have the same count, which a mark, one more Variable, raises. The
        # garbage collector and other threads lower counts, but not within one call.
        for _ in range(_ATTEMPTS):
            counts = list(map(_references, self._variables))
            of_leaves, of_outputs = counts[: len(self._reads)], counts[len(self._reads) :]
            common = set(of_leaves)
            if common.isdisjoint(of_outputs):
                return [], []
            common.intersection_update(of_outputs)
            reads = [read for read, count in zip(self._reads, of_leaves) if count in common]
            marks = _marks(reads)
            writes = [
                w for w, count in zip(self._writes, of_outputs) if w[0].get_number_of_references != count
            ]
            del marks
            shared = _sharing(reads, writes)
            carried = _sharing(shared, _overwriting(shared, writes))
            if list(map(_references, self._variables)) == counts:
                break
        sharing = set(shared)
        # The next search distinguishes these leaves from the outputs by their counts.
        self._marks += _marks([read for read in reads if read not in sharing])
        return [v for v, _ in writes], [v for v, _ in carried]


def shared_memory_of(graph: Graph, plan: GraphPlan) -> SharedMemory:
    """Prepare the search in a graph with this plan."""
    variables, uses = graph.variables, plan.memory_uses
    return SharedMemory(
        [(variables[p], index) for p, index in uses.leaves.items()],
        [(variables[p], index) for p, index in uses.outputs.items()],
    )


def _overwriting(reads: List[Use], writes: List[Use]) -> List[Use]:
    """Elements of `writes` whose memory an earlier function, or the same, reads by `reads`."""
    before, overwriting, marks = _counts(writes), [], []
    waiting = sorted(reads, key=itemgetter(1), reverse=True)
    for write, count in zip(writes, before):
        while waiting and waiting[-1][1] <= write[1]:
            marks += _marks([waiting.pop()])
        if _counts([write]) != [count]:
            overwriting.append(write)
    return overwriting


def _sharing(some: List[Use], others: List[Use]) -> List[Use]:
    """Elements of `some` that share memory with one of `others`."""
    before, _marked = _counts(some), _marks(others)  # counts are higher as long as the marks exist
    return [use for use, count, then in zip(some, before, _counts(some)) if count != then]


def _counts(uses: List[Use]) -> List[int]:
    return [v.get_number_of_references for v, _ in uses]


def _marks(uses: List[Use]) -> List[nn.Variable]:
    """Make another Variable that refers to the memory of each."""
    return [v.get_unlinked_variable() for v, _ in uses]
