# SPDX-License-Identifier: Apache-2.0
"""The ranks that take part in an exchange, and the check that all of them make the same call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Tuple

import numpy as np
import numpy.typing as npt

from .agreement import (
    Call,
    CollectiveMismatchError,
    describe_mismatch,
    fingerprint,
)

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True)
class ProcessGroup:
    """Named ranks and the MPI communicator between them.

    Attributes:
        name: name of the group.
        ranks: the members' ranks in the job, in the order of their numbers in the group.
        comm: mpi4py communicator of the members; MPI's null communicator on all other ranks.
        mpi: the module `mpi4py.MPI`, which is imported only when a communicator is made.
    """

    name: str
    ranks: Tuple[int, ...]
    comm: MPI.Comm
    mpi: Any

    @property
    def rank(self) -> int:
        """This process's number in the group."""
        return self.comm.Get_rank()

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    def compare_calls(self, call: Call) -> None:
        """Wait until all members make a call, and check that it is the same. It takes a message of 16 bytes.

        Raises:
            CollectiveMismatchError: on every member.
        """
        own = fingerprint(call)
        # The smallest fingerprint and the complement of the largest: both are our own only if all are equal.
        bounds = self.reduce_ints(np.array([own, ~own], np.int64), self.mpi.MIN)
        if bounds.tolist() != [own, ~own]:
            raise CollectiveMismatchError(describe_mismatch(self.ranks, self.comm.allgather(call)))

    def reduce_ints(self, values: npt.NDArray[Any], operation: MPI.Op) -> npt.NDArray[Any]:
        """Reduce integers over the members in place, and return them."""
        self.comm.Allreduce(self.mpi.IN_PLACE, values, operation)
        return values
