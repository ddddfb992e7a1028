# SPDX-License-Identifier: Apache-2.0
"""A small training of which each rank has its share of every batch, and what ranks know of each other."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, TypeVar

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np

from nnabla_adaloss import AdaptiveLossScalingUpdater, MPICommunicator, UpdateResult
from tests.worlds.tampering import Gate
from tests.worlds.trainings import solver_of

BATCH = 24  # divides by 2, 3 and 4 ranks
Parameters = Dict[str, np.ndarray]


class Task(NamedTuple):
    """What an updater is made of."""

    comm: Optional[MPICommunicator]
    solver: Any
    loss: nn.Variable
    feed: Callable[[], None]

    def updater(self, **options: Any) -> AdaptiveLossScalingUpdater:
        options = {"comm": self.comm, **options}
        return AdaptiveLossScalingUpdater(self.solver, self.loss, self.feed, **options)

    def snapshot(self) -> Parameters:
        return {name: v.d.copy() for name, v in sorted(self.solver.get_parameters().items())}

    def bits(self) -> Dict[str, bytes]:
        return {name: array.tobytes() for name, array in self.snapshot().items()}


def task(
    comm: Optional[MPICommunicator],
    *,
    seed: int = 0,
    weight: float = 1.0,
    spoiled: Mapping[int, str] = {},
    enlarged: float = 1.0,
    steep: float = 1.0,
) -> Task:
    """A classifier and this rank's share of the batches, which are the same for any number of ranks.

    `seed` decides the initial weights. On this rank the loss is multiplied by `weight`, images are multiplied
    by `enlarged`, gradients by `steep`. Batches of the last rank are `spoiled`, by number: "gradient" (not
    finite, though the loss is), "large" (gradients a hundred times larger), "nan" (in the data), "loss"
    (infinite, though its gradients are finite).
    """
    nn.clear_parameters()
    rank, size = (comm.rank, comm.size) if comm else (0, 1)
    share = BATCH // size
    spoiled = spoiled if rank == size - 1 else {}
    x, t = nn.Variable((share, 20)), nn.Variable((share, 1))
    slope, offset, gain = nn.Variable((1,)), nn.Variable((1,)), Gate()
    weights = np.random.default_rng(seed)

    def affine(h: nn.Variable, outputs: int, name: str) -> nn.Variable:
        return PF.affine(h, outputs, name=name, w_init=lambda shape: weights.standard_normal(shape) * 0.2)

    h = F.tanh(affine(x, 16, "first"))
    h = F.tanh(affine(h, 16, "second"))
    y = gain(affine(h, 5, "third"))
    cross_entropy = F.reshape(F.mean(F.softmax_cross_entropy(y, t)), (1,)) * weight
    # Where `slope` is 0 this is a 0 whose derivative is infinite.
    root = F.pow_scalar(cross_entropy * 0.0 + slope, 0.5) - F.pow_scalar(slope, 0.5)
    loss = F.sum(cross_entropy + root + offset)
    data = np.random.default_rng(1)
    batches = iter(range(10**9))

    def feed() -> None:
        images, labels = data.standard_normal((BATCH, 20)), data.integers(0, 5, (BATCH, 1))
        mine = slice(rank * share, (rank + 1) * share)
        x.d, t.d = images[mine] * enlarged, labels[mine]
        kind = spoiled.get(next(batches), "")
        slope.d = 0.0 if kind == "gradient" else 1.0
        offset.d = np.inf if kind == "loss" else 0.0
        gain.factor = 100.0 * steep if kind == "large" else steep
        if kind == "nan":
            x.d[0, 0] = np.nan

    solver = solver_of(S.Momentum(0.05))
    return Task(comm, solver, loss, feed)


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


class Decision(NamedTuple):
    """What came of an iteration. A batch is run again by its own rank alone."""

    updated: bool
    scale: float
    lost: int  # batches, by now
    reason: str
    iteration: int
    scale_state: Any


def decisions(
    updater: AdaptiveLossScalingUpdater, iterations: int, update: Optional[Callable[[], UpdateResult]] = None
) -> List[Decision]:
    """What each iteration decided; `update` is what an iteration calls, the updater's if left out."""
    found: List[Decision] = []
    for _ in range(iterations):
        result = (update or updater.update)()
        lost = sum(updater.counters.lost.values())
        what = result.updated, result.scale, lost, result.reason
        found.append(Decision(*what, updater.iteration, updater.scale_state))
    return found
