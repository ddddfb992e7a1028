# SPDX-License-Identifier: Apache-2.0
"""Named processes, and how they see that they do and hold the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, List, Mapping, Tuple

import numpy as np
from numpy.typing import NDArray

from .agreement import (
    Call,
    CollectiveMismatchError,
    RankDisagreementError,
    checksum,
    describe_mismatch,
    fingerprint,
    ranks_by_value,
)

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True)
class ProcessGroup:
    """Named ranks of a job, in the order of their numbers in the group, and the communicator between them."""

    name: str
    ranks: Tuple[int, ...]
    comm: MPI.Comm  # MPI's null communicator on all other ranks
    mpi: Any  # the module mpi4py.MPI, which is imported only when a communicator is made

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    def reduce_ints(self, values: NDArray[Any], operation: MPI.Op) -> NDArray[Any]:
        """Reduce integers over the members in place, and return them."""
        self.comm.Allreduce(self.mpi.IN_PLACE, values, operation)
        return values

    def differing(self, values: List[int]) -> List[int]:
        """Positions of the 64-bit integers that are not the same on all members."""
        own = np.array(values, np.int64)
        # One reduction gives both bounds: `~x` reverses the order and cannot overflow.
        lower, upper = self.reduce_ints(np.stack([own, ~own]), self.mpi.MIN)
        positions: List[int] = np.flatnonzero(lower != ~upper).tolist()
        return positions

    def compare_calls(self, call: Call) -> None:
        """Wait until all members make a call; a CollectiveMismatchError on all unless it is the same."""
        if self.differing([fingerprint(call)]):
            raise CollectiveMismatchError(describe_mismatch(self.ranks, self.comm.allgather(call)))

    def compare_values(self, values: Mapping[str, NDArray[Any]], what: str) -> None:
        """A RankDisagreementError on all members unless arrays have the same bits on all."""
        checksums = list(map(checksum, values.values()))
        different = self.differing(checksums)
        if not different:
            return
        name, value = list(values.items())[different[0]]
        own = value.item() if value.size == 1 else f"checksum {checksums[different[0]] & (2**64 - 1):#018x}"
        held = ranks_by_value(zip(self.ranks, self.comm.allgather(own)))
        raise RankDisagreementError(
            f"{what} differ between ranks: {name!r} is {held}; {len(different)} of {len(values)} differ. "
            "The ranks no longer train the same model: look for what changes them on one rank only, such as "
            "a step taken or skipped there, an initialization after the broadcast, or gradients that were "
            "not exchanged."
        )
