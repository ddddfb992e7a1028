# SPDX-License-Identifier: Apache-2.0
"""What layers' scales are computed from, and that it travels with the gradients."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any, Dict, List

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScalingUpdater, MPICommunicator
from tests.distributed.workers.task import Task, by_first, is_last, same_on_all, task
from tests.worlds.trainings import AS_THE_BASELINE, solver_of

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
    return {"steep": 3.0**-comm.rank, "enlarged": 4.0**comm.rank}


def check_delayed_scales_are_equal_on_all_ranks_though_data_differ(comm: MPICommunicator) -> None:
    every_fourth = replace(DELAYED, update_per_n_iteration=4)
    settings: List[Dict[str, Any]] = [
        {"config": DELAYED},
        {"config": DELAYED, "average": True},
        {"config": every_fourth},
        {"config": DELAYED, "accum_grad": 3, "check_every": 1},
    ]
    for options in settings:
        updater = task(comm, **unequal(comm)).updater(**AS_THE_BASELINE, **options)
        assert same_on_all(comm, accumulated_scales(updater)), options
    alone = task(comm, **unequal(comm)).updater(**AS_THE_BASELINE, comm=None, config=DELAYED)
    assert not same_on_all(comm, accumulated_scales(alone))


def of_one_process(weight: float) -> List[Dict[str, float]]:
    return accumulated_scales(task(None, weight=weight).updater(**AS_THE_BASELINE, config=DELAYED))


def check_delayed_scales_are_those_of_the_whole_batch(comm: MPICommunicator) -> None:
    for weight in (1.0, 1e-12, 1e-25):
        whole = by_first(comm, partial(of_one_process, weight))
        work = task(comm, weight=weight / comm.size)
        assert accumulated_scales(work.updater(**AS_THE_BASELINE, config=DELAYED)) == whole, weight


def check_ranks_with_other_loss_weights_have_scales_that_differ_by_these_alone(comm: MPICommunicator) -> None:
    weight = 4.0**-comm.rank
    updater = task(comm, weight=weight, enlarged=4.0**comm.rank).updater(config=AdaLossConfig(delay=1))
    found = [{n: s * weight for n, s in scales.items()} for scales in accumulated_scales(updater)]
    assert same_on_all(comm, found)
    assert same_on_all(comm, updater.scaling.components.unit_amaxes())


def with_heads(comm: MPICommunicator) -> Task:
    """A trunk with a head for each rank; the last one has that of the first, too."""
    nn.clear_parameters()
    random, x = np.random.default_rng(comm.rank), nn.Variable((4, 6))
    h = F.tanh(PF.affine(F.tanh(PF.affine(x, 6, name="bottom")), 6, name="trunk"))
    losses = [F.mean(PF.affine(h, 3, name=f"head{rank}") ** 2) for rank in range(comm.size)]
    loss = losses[comm.rank] + losses[0] if is_last(comm) else losses[comm.rank]

    def feed() -> None:
        x.d = random.standard_normal(x.shape) * 4.0**comm.rank

    solver = solver_of(S.Sgd(0.01))
    return Task(comm, solver, loss, feed)


def check_ranks_whose_graphs_differ_agree_about_what_they_have_in_common(comm: MPICommunicator) -> None:
    counting = Counting()
    counting.init()
    for delay in (0, 1):
        config = replace(DELAYED, delay=delay)
        work = with_heads(comm)
        updater = work.updater(comm=counting, config=config, check_every=0)
        for iteration in range(8):
            before = counting.sums
            assert updater.update().updated
            assert counting.sums == before + 1 + (iteration == 0), (delay, iteration)
        assert same_on_all(comm, (updater.scaling.components.unit_amaxes(), work.bits()))


def check_ranks_take_turns_on_heads_and_leave_layers_out(comm: MPICommunicator) -> None:
    """Each rank builds its graph for each batch: another head, and as many layers as chance will have."""
    nn.clear_parameters()
    random, turn = np.random.default_rng(comm.rank), itertools.count(comm.rank)
    x, targets = nn.Variable((4, 6)), [nn.Variable((4, 3)) for _ in range(2)]

    def built(head: int, depth: int) -> nn.Variable:
        h = PF.affine(x, 6, name="stem")
        for index in range(depth):
            h = h + F.tanh(PF.affine(h, 6, name=f"block{index}"))
        y = PF.affine(h, 3, name=f"head{head}")
        return F.mean(F.squared_error(y, targets[head])) * (1.0, 1e-9)[head]

    loss = built(0, 3) + built(1, 3)
    solver = solver_of(S.Adam(1e-3, eps=1e-30))

    def feed() -> None:
        updater.loss = built(next(turn) % 2, int(random.integers(4)))
        x.d = random.standard_normal(x.shape)
        targets[0].d, targets[1].d = x.d[:, :3], x.d[:, 3:]

    updater = AdaptiveLossScalingUpdater(solver, loss, feed, storage="float16", comm=comm, check_every=1)
    results = [updater.update() for _ in range(60)]
    assert all(result.reason == "updated" for result in results)
    assert not any(result.retries for result in results[20:])
    assert same_on_all(comm, Task(comm, solver, loss, feed).bits())
