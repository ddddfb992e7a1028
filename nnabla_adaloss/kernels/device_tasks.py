# SPDX-License-Identifier: Apache-2.0
"""The tasks of a CUDA kernel: which of them may share a launch, and how a launch is told of them."""

from __future__ import annotations

from typing import Any, Iterator, Sequence, Set, Union

import numpy as np
from numpy.typing import NDArray

Column = Union[float, Sequence[float], NDArray[Any]]
"""A number for each task, or one for all."""


class DeviceTasks:
    """The fields of adaloss.cu's Task that do not follow from the launch, a column each.

    To write a column into the argument of a launch takes a tenth of the time that as many tasks take one by
    one. Sources and targets are addresses, 0 for no target; results go to `rows`; `independent` says that
    none reads or writes what another of them writes.
    """

    def __init__(
        self,
        sources: Sequence[int],
        targets: Column,
        sizes: Column,
        *,
        rows: Column = 0,
        factors: Column = 1.0,
        flags: Column = 0,
        independent: bool = False,
    ) -> None:
        self._count = count = len(sources)
        self._sources, self._targets, self._sizes, self._rows, self._flags = (
            _column(values, np.int64, count) for values in (sources, targets, sizes, rows, flags)
        )
        self._factors = _column(factors, np.float64, count)
        self._independent = independent

    def launches(self, longest: int) -> Iterator[slice]:
        """Successive tasks that may run at the same time: none reads or writes what another writes."""
        count = self._count
        if self._independent or self._are_independent:
            for start in range(0, count, longest):
                yield slice(start, min(start + longest, count))
            return
        start = 0
        read: Set[int] = set()
        written: Set[int] = set()
        for index, (source, target) in enumerate(zip(self._sources.tolist(), self._targets.tolist())):
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
        if not self._targets.any():
            return True
        sources, targets = self._sources.tolist(), self._targets.tolist()
        if len(set(targets)) != len(targets):
            return False
        return sources == targets or set(sources).isdisjoint(targets)

    def write(self, part: slice, argument: NDArray[Any], per_block: int, max_blocks: int) -> int:
        """Write some of the tasks into adaloss.cu's Tasks, and return the number of blocks of all.

        A block works on `per_block` elements, on more where a task would have more than `max_blocks`.
        """
        count = part.stop - part.start
        task = argument["task"][0, :count]
        sizes = self._sizes[part]
        task["source"], task["target"], task["size"] = self._sources[part], self._targets[part], sizes
        task["row"], task["factor"], task["flags"] = self._rows[part], self._factors[part], self._flags[part]
        # Half the time of np.clip, of which an iteration would take several.
        blocks = np.minimum(np.maximum(-(-sizes // per_block), 1), max_blocks)
        ends = blocks.cumsum()
        task["first_block"] = ends - blocks
        argument["count"] = count
        return int(ends[-1])


def _column(values: Column, dtype: Any, count: int) -> NDArray[Any]:
    if not isinstance(values, (int, float)):
        return np.asarray(values, dtype)
    column = np.zeros(count, dtype)
    if values:
        column.fill(values)
    return column
