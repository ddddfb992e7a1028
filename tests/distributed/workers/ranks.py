# SPDX-License-Identifier: Apache-2.0
"""What ranks know of each other in a test."""

from __future__ import annotations

from typing import Any, Callable, List, NamedTuple, Optional, TypeVar

from nnabla_adaloss import AdaptiveLossScalingUpdater, UpdateResult
from nnabla_adaloss.communicators import MPICommunicator

T = TypeVar("T")


def from_all(comm: MPICommunicator, own: T) -> List[T]:
    """The objects of all ranks, in the order of ranks."""
    return [comm.broadcast_object(own, src=rank) for rank in range(comm.size)]


def is_last(comm: MPICommunicator) -> bool:
    """Whether this is the rank to which things happen that happen on one rank only."""
    return comm.rank == comm.size - 1


def by_first(comm: MPICommunicator, compute: Callable[[], T]) -> T:
    """What the first rank computes, on all ranks: cores are fewer than ranks."""
    return comm.broadcast_object(compute() if comm.rank == 0 else None)


def same_on_all(comm: MPICommunicator, own: T) -> bool:
    """Whether all ranks have an equal object."""
    return all(one == own for one in from_all(comm, own))


class Decided(NamedTuple):
    """What came of an iteration. A batch is run again by its own rank alone."""

    updated: bool
    scale: float
    lost: int  # batches, by now
    reason: str
    iteration: int
    scale_state: Any


def decisions(
    updater: AdaptiveLossScalingUpdater, iterations: int, update: Optional[Callable[[], UpdateResult]] = None
) -> List[Decided]:
    """What each iteration decided; `update` is what an iteration calls, the updater's if left out."""
    found: List[Decided] = []
    for _ in range(iterations):
        result = (update or updater.update)()
        lost = sum(updater.counters.lost.values())
        what = result.updated, result.scale, lost, result.reason
        found.append(Decided(*what, updater.iteration, updater.scale_state))
    return found
