# SPDX-License-Identifier: Apache-2.0
"""The tasks of a CUDA kernel: which of them may share a launch, and how a launch is told of them."""

from __future__ import annotations

from typing import Any, Iterator, List, NamedTuple, Sequence, Set, Union

import numpy as np
from numpy.typing import NDArray


class DeviceTasks(NamedTuple):
    """The fields of adaloss.cu's Task that do not follow from the launch, a column each.

    To write a column into the argument of a launch takes a tenth of the time that as many tasks take one by
    one.

    Attributes:
        sources: addresses of what is read.
        targets: addresses of what is written; 0 for none.
        sizes: numbers of elements.
        rows: where the results go.
        factors: what numbers are multiplied by.
        flags: bits that say how.
    """

    sources: List[int]
    targets: List[int]
    sizes: Union[Sequence[int], NDArray[np.int64]]
    rows: Sequence[int]
    factors: Union[Sequence[float], NDArray[np.float64]]
    flags: List[int]

    def launches(self, longest: int) -> Iterator[slice]:
        """Successive tasks that may run at the same time: none reads or writes what another of them writes.

        Args:
            longest: how many a launch takes.
        """
        count = len(self.sources)
        if self._are_independent:
            for start in range(0, count, longest):
                yield slice(start, min(start + longest, count))
            return
        start = 0
        read: Set[int] = set()
        written: Set[int] = set()
        for index, (source, target) in enumerate(zip(self.sources, self.targets)):
            if index - start == longest or source in written or target in read or target in written:
                yield slice(start, index)
                start, read, written = index, set(), set()
            read.add(source)
            if target:
                written.add(target)
        if start < count:
            yield slice(start, count)

    @property
    def _are_independent(self) -> bool:
        """Whether all are, as nearly always; False where it takes a closer look."""
        if not any(self.targets):
            return True
        if len(set(self.targets)) != len(self.targets):
            return False
        return self.sources == self.targets or set(self.sources).isdisjoint(self.targets)

    def write(self, part: slice, argument: NDArray[Any], per_block: int, max_blocks: int) -> int:
        """Write tasks into the argument of a launch.

        Args:
            part: which tasks.
            argument: adaloss.cu's Tasks, shape (1,).
            per_block: how many elements a thread block works on.
            max_blocks: the largest number of blocks for one task.

        Returns:
            The number of blocks of all.
        """
        count = part.stop - part.start
        task = argument["task"][0, :count]
        task["source"], task["target"] = self.sources[part], self.targets[part]
        sizes = np.asarray(self.sizes[part], np.int64)
        task["size"], task["row"] = sizes, self.rows[part]
        task["factor"], task["flags"] = self.factors[part], self.flags[part]
        blocks = np.clip(-(-sizes // per_block), 1, max_blocks)
        ends = blocks.cumsum()
        task["first_block"] = ends - blocks
        argument["count"] = count
        return int(ends[-1])
