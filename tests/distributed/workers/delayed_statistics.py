# SPDX-License-Identifier: Apache-2.0
"""What layers' scales are computed from, and that it travels with the gradients."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Dict, List

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScalingUpdater
from nnabla_adaloss.communicators import MPICommunicator
from tests.distributed.workers.ranks import by_first, same_on_all
from tests.distributed.workers.task import task
from tests.updaters.networks import AS_THE_BASELINE

# With float16's own range the gradients of so small a network would need no scales.
DELAYED = AdaLossConfig(loss_scale_method="approx_range", delay=1, u_min=0.01, use_bound=False)


class Counting(MPICommunicator):
    """Counts the sums that are taken."""

    sums = 0

    def all_reduce(self, *arguments: Any, **options: Any) -> None:
        self.sums += 1
        super().all_reduce(*arguments, **options)


def accumulated_scales(updater: AdaptiveLossScalingUpdater, iterations: int = 10) -> List[Dict[str, float]]:
    """Per iteration the scale of each layer's input gradient: S0, the loss's lift and the alphas so far.

    Those of the first are left out: there each rank knows its own batch alone.
    """
    assert updater.update().updated
    found = []
    for _ in range(iterations):
        assert updater.update().updated
        found.append(updater.scaling.accumulated_scales)
    return found


def unequal(comm: MPICommunicator) -> Dict[str, float]:
    """What makes gradients of ranks differ by more than chance."""
    return {"weight": 3.0**-comm.rank, "enlarged": 4.0**comm.rank}


def check_one_sum_per_iteration_carries_gradients_and_statistics(comm: MPICommunicator) -> None:
    counting = Counting()
    counting.init()
    for delay in (0, 1):
        updater = task(comm).updater(
            comm=counting, config=AdaLossConfig(loss_scale_method="approx_range", delay=delay)
        )
        for _ in range(5):
            before = counting.sums
            assert updater.update().updated
            assert counting.sums == before + 1


def check_delayed_scales_are_equal_on_all_ranks_though_data_differ(comm: MPICommunicator) -> None:
    for average in (False, True):
        for every in (1, 4):
            config = replace(DELAYED, update_per_n_iteration=every)
            work = task(comm, **unequal(comm))
            updater = work.updater(**AS_THE_BASELINE, config=config, average=average)
            assert same_on_all(comm, accumulated_scales(updater))
    alone = task(comm, **unequal(comm)).updater(**AS_THE_BASELINE, comm=None, config=DELAYED)
    assert not same_on_all(comm, accumulated_scales(alone))


def of_one_process(weight: float) -> List[Dict[str, float]]:
    return accumulated_scales(task(None, weight=weight).updater(**AS_THE_BASELINE, config=DELAYED))


def check_delayed_scales_are_those_of_the_whole_batch(comm: MPICommunicator) -> None:
    for weight in (1.0, 1e-12, 1e-25):
        whole = by_first(comm, partial(of_one_process, weight))
        work = task(comm, weight=weight / comm.size)
        assert accumulated_scales(work.updater(**AS_THE_BASELINE, config=DELAYED)) == whole, weight


def check_micro_batches_share_one_set_of_scales(comm: MPICommunicator) -> None:
    work = task(comm, **unequal(comm))
    updater = work.updater(**AS_THE_BASELINE, config=DELAYED, accum_grad=3, check_every=1)
    assert same_on_all(comm, accumulated_scales(updater))
