# SPDX-License-Identifier: Apache-2.0
"""Groups of processes that compare their calls and their values."""

from __future__ import annotations

import zlib
from collections import defaultdict
from functools import lru_cache
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Dict, Hashable, Iterable, List, Mapping, NamedTuple, Sequence, Tuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from mpi4py import MPI


class CollectiveMismatchError(RuntimeError):
    """Ranks made different collective calls, or the same call with arrays of different shapes."""


class RankDisagreementError(RuntimeError):
    """Values that must be equal on all ranks are not."""


class Call(NamedTuple):
    """A collective call, which must be the same on every rank."""

    operation: str
    options: Tuple[Tuple[str, Hashable], ...] = ()
    entries: Tuple[Hashable, ...] = ()  # shapes of the arrays, or names of the values

    def __str__(self) -> str:
        arguments = [f"{len(self.entries)} entries"] if self.entries else []
        arguments += [f"{name}={value!r}" for name, value in self.options]
        return f"{self.operation}({', '.join(arguments)})"


class ProcessGroup(NamedTuple):
    """Ranks of a job, in the order of their numbers in the group, and the communicator between them."""

    ranks: Tuple[int, ...]
    comm: MPI.Comm  # MPI's null communicator on all other ranks

    def compare_calls(self, call: Call) -> None:
        """Wait until all members make a call; raise CollectiveMismatchError on all unless it is the same."""
        if len({*self.comm.allgather(call_number(call))}) == 1:
            return
        calls = self.comm.allgather(call)
        if len({(one.operation, one.options) for one in calls}) > 1:
            difference = _by_rank(self.ranks, calls)
        else:
            columns = enumerate(zip_longest(*(one.entries for one in calls), fillvalue="missing"))
            position, entries = next((number, row) for number, row in columns if len({*row}) > 1)
            counts = _by_rank(self.ranks, (len(one.entries) for one in calls))
            given = f"entry {position} given to {call.operation} is {_by_rank(self.ranks, entries)}"
            difference = f"{given}; entries: {counts}"
        raise CollectiveMismatchError(
            f"ranks made different collective calls: {difference}. Every rank must make the same calls in "
            "the same order with arrays of the same shapes: look for code or parameters that depend on the "
            "rank."
        )

    def compare_values(self, values: Mapping[str, NDArray[Any]], what: str) -> None:
        """Raise RankDisagreementError on all members unless the arrays have the same bits on all."""
        checksums = list(map(checksum, values.values()))
        of_each = zip(*self.comm.allgather(checksums))
        different = [position for position, row in enumerate(of_each) if len({*row}) > 1]
        if not different:
            return
        name, value = list(values.items())[different[0]]
        own = value.item() if value.size == 1 else f"checksum {checksums[different[0]]:#010x}"
        raise RankDisagreementError(
            f"{what} differ between ranks: {name!r} is {_by_rank(self.ranks, self.comm.allgather(own))}; "
            f"{len(different)} of {len(values)} differ. "
            "The ranks no longer train the same model: look for code that changes them on one rank, such as "
            "a step taken or skipped there, an initialization after the broadcast, gradients not exchanged."
        )


@lru_cache(maxsize=64)
def call_number(call: Call) -> int:
    """A number equal on all ranks that make the same call (unlike `hash`, which is salted)."""
    return zlib.crc32(repr(call).encode())


def checksum(array: NDArray[Any]) -> int:
    """The CRC-32 of an array's bits, dtype and element count: -0 and +0 differ, NaNs compare."""
    head = zlib.crc32(f"{array.dtype.str}{array.size}".encode())
    return zlib.crc32(np.ascontiguousarray(array).data, head)


def _by_rank(ranks: Sequence[int], values: Iterable[object]) -> str:
    """The ranks that hold each value: `"16.0 on ranks 0, 2; 8.0 on rank 1"`."""
    # As text, in which 0.0 and -0.0 differ, and NaNs do not.
    holders: Dict[str, List[int]] = defaultdict(list)
    for rank, value in zip(ranks, values):
        holders[str(value)].append(rank)
    return "; ".join(
        f"{value} on rank{'s' if len(held_by) > 1 else ''} {', '.join(map(str, held_by))}"
        for value, held_by in holders.items()
    )
