# SPDX-License-Identifier: Apache-2.0
"""What ranks know of each other in a test."""

from __future__ import annotations

from typing import Callable, List, Mapping, TypeVar

from nnabla_adaloss.communicators import MPICommunicator

T = TypeVar("T")


def from_all(comm: MPICommunicator, own: T) -> List[T]:
    """The objects of all ranks, in the order of ranks."""
    return [comm.broadcast_object(own, src=rank) for rank in range(comm.size)]


def is_last(comm: MPICommunicator) -> bool:
    """Whether this is the rank to which things happen that happen on one rank only."""
    return comm.rank == comm.size - 1


def on_last(comm: MPICommunicator, spoiled: Mapping[int, str]) -> Mapping[int, str]:
    """Spoiled batches of the last rank."""
    return spoiled if is_last(comm) else {}


def by_first(comm: MPICommunicator, compute: Callable[[], T]) -> T:
    """What the first rank computes, on all ranks: cores are fewer than ranks."""
    return comm.broadcast_object(compute() if comm.rank == 0 else None)


def same_on_all(comm: MPICommunicator, own: T) -> bool:
    """Whether all ranks have an equal object."""
    return all(one == own for one in from_all(comm, own))
