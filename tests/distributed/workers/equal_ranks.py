# SPDX-License-Identifier: Apache-2.0
"""Ranks hold the same parameters, and those that one process would have."""

from __future__ import annotations

from typing import Any, List

import numpy as np

from nnabla_adaloss import AdaLossConfig
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
            work = task(comm, seed=comm.rank)
            assert distinct(comm, work.snapshot()) == comm.size
            after = trained(work, config=AdaLossConfig(delay=delay), storage=storage)
            assert distinct(comm, after) == 1


def check_ranks_train_like_one_process_on_the_whole_batch(comm: MPICommunicator) -> None:
    accumulated = {"accum_grad": 2, "iterations": 10}
    alone, alone_accumulated = by_first(
        comm, lambda: (trained(task(None)), trained(task(None), average=True, **accumulated))
    )
    for delay in (0, 1):
        options = {"config": AdaLossConfig(delay=delay)}
        for found, expected in (
            (trained(task(comm), average=True, **options), alone),
            (trained(task(comm, weight=1 / comm.size), **options), alone),
            (trained(task(comm), average=True, **accumulated, **options), alone_accumulated),
        ):
            for name, array in expected.items():
                np.testing.assert_allclose(found[name], array, rtol=0, atol=1e-6, err_msg=name)
