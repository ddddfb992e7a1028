# SPDX-License-Identifier: Apache-2.0
"""Ranks hold the same parameters, those that one process would have; what drifts apart is told on all."""

from __future__ import annotations

import itertools
from typing import Any, Callable, Dict

import numpy as np
import pytest

from nnabla_adaloss import (
    AdaLossConfig,
    AdaptiveLossScalingUpdater,
    CollectiveMismatchError,
    MPICommunicator,
    RankDisagreementError,
)
from tests.distributed.workers.task import Parameters, Task, by_first, is_last, same_on_all, task
from tests.worlds.trainings import AS_THE_BASELINE


def update(updater: AdaptiveLossScalingUpdater, iterations: int) -> None:
    for _ in range(iterations):
        assert updater.update().updated


def trained(work: Task, iterations: int = 30, **options: Any) -> Parameters:
    update(work.updater(N=5, **options), iterations)
    return work.snapshot()


def check_ranks_that_start_different_are_equal_to_the_bit(comm: MPICommunicator) -> None:
    for delay in (0, 1):
        for storage in (None, "float16"):
            work = task(comm, seed=comm.rank)
            assert not same_on_all(comm, work.bits())
            after = trained(work, config=AdaLossConfig(delay=delay), storage=storage)
            assert all(np.isfinite(array).all() for array in after.values())
            assert same_on_all(comm, work.bits())


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


Plant = Callable[[AdaptiveLossScalingUpdater], None]


def one_bit_of_a_parameter(updater: AdaptiveLossScalingUpdater) -> None:
    weight = updater.solver.get_parameters()["second/affine/W"].data.data
    weight[3, 5] = np.nextafter(weight[3, 5], np.float32(np.inf))


def the_global_scale(updater: AdaptiveLossScalingUpdater) -> None:
    updater.scale = 16.0


def what_was_measured(updater: AdaptiveLossScalingUpdater) -> None:
    state = updater.scaling.state_dict()
    _, (newest, *_) = state["components"]["windows"]["second/affine/Tanh"]
    newest[1] *= 2.0
    updater.scaling.load_state_dict(state)


def check_what_was_planted_on_one_rank_is_found_by_all(comm: MPICommunicator) -> None:
    plants: Dict[Plant, str] = {
        one_bit_of_a_parameter: "second/affine/W",
        the_global_scale: "the loss scales",
        what_was_measured: "the loss scales",
    }
    for delay, (plant, named) in itertools.product((0, 1), plants.items()):
        config = AdaLossConfig(loss_scale_method="approx_range", delay=delay, u_min=0.01)
        updater = task(comm).updater(**AS_THE_BASELINE, config=config, check_every=4)
        update(updater, 5)
        if is_last(comm):
            plant(updater)
        with pytest.raises(RankDisagreementError, match=f"in iteration 8: .*{named}") as caught:
            update(updater, 4)
        assert f"(rank {comm.rank} {'differs' if is_last(comm) else 'agrees'}" in str(caught.value)
        assert same_on_all(comm, updater.iteration)


def check_a_check_that_is_switched_off_finds_nothing(comm: MPICommunicator) -> None:
    updater = task(comm).updater(**AS_THE_BASELINE, check_every=0)
    update(updater, 1)
    if is_last(comm):
        the_global_scale(updater)
    update(updater, 3)


def check_a_network_that_differs_is_refused_by_all(comm: MPICommunicator) -> None:
    work = task(comm)
    if comm.rank:
        work.solver.remove_parameters(["third/affine/b"])
    with pytest.raises(CollectiveMismatchError, match=r"bcast .* entries: 6 on rank 0; 5 on rank"):
        work.updater(**AS_THE_BASELINE).update()
