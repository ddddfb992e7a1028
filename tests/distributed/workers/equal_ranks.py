# SPDX-License-Identifier: Apache-2.0
"""Ranks hold the same parameters, and those that one process would have."""

from __future__ import annotations

from typing import Any, List

import numpy as np

from nnabla_adaloss import AdaLossConfig, DynamicLossScalingUpdater
from nnabla_adaloss.communicators import MPICommunicator
from tests.distributed.workers.ranks import by_first, from_all
from tests.distributed.workers.task import Parameters, Task, task


def trained(work: Task, iterations: int = 30, **options: Any) -> Parameters:
    updater = work.updater(N=5, **options)
    for _ in range(iterations):
        assert updater.update().updated
    return work.snapshot()


def distinct(comm: MPICommunicator, parameters: Parameters) -> int:
    """How many ranks hold something of their own, in the parameter in which most do."""
    counts: List[int] = []
    for array in parameters.values():
        assert np.isfinite(array).all()
        counts.append(len(set(from_all(comm, array.tobytes()))))
    return max(counts)


def check_ranks_that_start_different_are_equal_to_the_bit(comm: MPICommunicator) -> None:
    for delay in (0, 1):
        for storage in (None, "float16"):
            work = task(comm.rank, comm.size, seed=comm.rank)
            assert distinct(comm, work.snapshot()) == comm.size
            after = trained(work, comm=comm, config=AdaLossConfig(delay=delay), storage=storage)
            assert distinct(comm, after) == 1


def check_the_baseline_exchanges_nothing_when_it_is_told_no_gradients(comm: MPICommunicator) -> None:
    """Which is why ours exchanges all; and the data of ranks differ enough to tell."""
    work = task(comm.rank, comm.size)
    updater = DynamicLossScalingUpdater(work.solver, work.loss, work.feed, comm=comm)
    for _ in range(3):
        updater.update()
    assert distinct(comm, work.snapshot()) == comm.size


def check_ranks_train_like_one_process_on_the_whole_batch(comm: MPICommunicator) -> None:
    alone = by_first(comm, lambda: trained(task(0, 1)))
    for delay in (0, 1):
        config = AdaLossConfig(delay=delay)
        averaged = trained(task(comm.rank, comm.size), comm=comm, average=True, config=config)
        summed = trained(task(comm.rank, comm.size, weight=1 / comm.size), comm=comm, config=config)
        for name, array in alone.items():
            np.testing.assert_allclose(averaged[name], array, rtol=0, atol=1e-6, err_msg=name)
            np.testing.assert_allclose(summed[name], array, rtol=0, atol=1e-6, err_msg=name)


def check_accumulated_batches_are_exchanged_once(comm: MPICommunicator) -> None:
    options = {"average": True, "accum_grad": 2, "iterations": 10}
    alone = by_first(comm, lambda: trained(task(0, 1), **options))
    together = trained(task(comm.rank, comm.size), comm=comm, **options)
    for name, array in alone.items():
        np.testing.assert_allclose(together[name], array, rtol=0, atol=1e-6, err_msg=name)
