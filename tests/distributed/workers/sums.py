# SPDX-License-Identifier: Apache-2.0
"""Overflows that no rank, or one rank alone, can see in its own gradients."""

from __future__ import annotations

from typing import Mapping, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np

from nnabla_adaloss import AdaLossConfig
from nnabla_adaloss.communicators import MPICommunicator
from tests.distributed.workers.ranks import decisions, is_last, same_on_all
from tests.distributed.workers.task import Task
from tests.worlds.trainings import AS_THE_BASELINE

DELAYS = (0, 1)


def work(comm: MPICommunicator, *, gains: Mapping[int, float] = {}, spoiled: Tuple[int, ...] = ()) -> Task:
    """A linear model, and a parameter beside it: two branches that share none.

    Args:
        gains: by number of the batch, what the loss of the model is multiplied by.
        spoiled: batches in which the gradient of the parameter beside it is not finite; all others are.
    """
    nn.clear_parameters()
    x = nn.Variable.from_numpy_array(np.full((4, 3), 0.01, np.float32))
    gain, slope = nn.Variable((1,)), nn.Variable((1,))
    model = F.reshape(F.mean(PF.affine(x, 1, name="model", w_init=np.full((3, 1), 0.1, np.float32))), (1,))
    beside = PF.get_parameter_or_create("beside", (1,), np.ones(1, np.float32))
    # A square root has an infinite slope at 0.
    loss = F.sum(model * gain + F.pow_scalar(beside * 0.0 + slope, 0.5))
    batches = iter(range(10**9))

    def feed() -> None:
        batch = next(batches)
        gain.d = gains.get(batch, 1.0)
        slope.d = float(batch not in spoiled)

    solver = S.Sgd(1e-3)
    solver.set_parameters(nn.get_parameters())
    return Task(comm, solver, loss, feed)


def check_a_sum_that_overflows_where_no_rank_did_lowers_the_global_scale(comm: MPICommunicator) -> None:
    for delay in DELAYS:
        made = work(comm, gains={1: 3e38})
        # No layer has a scale of its own: in none can the cause be.
        config = AdaLossConfig(loss_scale_method="fixed", delay=delay)
        updater = made.updater(scale=1.0, config=config, **AS_THE_BASELINE)
        found = [decided[:4] for decided in decisions(updater, 3)]
        assert found == [(True, 1.0, 0, "updated"), (True, 0.5, 1, "updated"), (True, 0.5, 1, "updated")]
        assert same_on_all(comm, made.bits())


def check_an_infinity_that_is_not_exchanged_stops_all_ranks(comm: MPICommunicator) -> None:
    for delay in DELAYS:
        made = work(comm, spoiled=(1,) if is_last(comm) else ())
        exchanged = [nn.get_parameters()[f"model/affine/{name}"].grad for name in ("W", "b")]
        config = AdaLossConfig(delay=delay)
        updater = made.updater(grads=exchanged, config=config, **AS_THE_BASELINE)
        found = [decided[:4] for decided in decisions(updater, 3)]
        assert same_on_all(comm, found), found
        assert found == [(True, 8.0, 0, "updated"), (True, 4.0, 1, "updated"), (True, 4.0, 1, "updated")]
        assert same_on_all(comm, made.bits())
