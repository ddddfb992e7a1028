# SPDX-License-Identifier: Apache-2.0
"""Ranks whose graphs are unrolled to lengths of their own go on from checkpoints."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Dict

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np

from nnabla_adaloss import AdaptiveLossScalingUpdater, MPICommunicator, load_checkpoint, save_checkpoint
from tests.distributed.workers.task import same_on_all
from tests.worlds.trainings import solver_of
from tests.worlds.values import snapshot, solver_states

SAVED, END = 7, 14


def training(
    comm: MPICommunicator, *, in_logarithms: bool = False, **options: Any
) -> AdaptiveLossScalingUpdater:
    """A recurrent net on sequences whose length depends on the rank and the batch; or its loss is a product
    of logarithms, so that data decide the loss weights.
    """
    nn.clear_parameters()

    def build() -> nn.Variable:
        number = updater.counters.fed if updater else 0
        rng, h = np.random.default_rng((comm.rank, number)), F.constant(0.0, (4, 3))
        for _ in range(2 + (comm.rank + number) % 3):
            x = nn.Variable.from_numpy_array(rng.standard_normal((4, 3)).astype(np.float32))
            weights = [np.random.RandomState(seed) for seed in (0, 1)]
            h = F.tanh(PF.affine(x, 3, name="x", rng=weights[0]) + PF.affine(h, 3, name="h", rng=weights[1]))
        losses = []
        for name in ("out", "other") if in_logarithms else ("out",):
            y = PF.affine(h, 2, name=name, rng=np.random.RandomState(len(name)))
            losses.append(F.mean(y**2) * 30.0 ** rng.uniform(-1, 1) if in_logarithms else F.mean(y**2))
        return F.log(losses[0]) * F.log(losses[1]) if in_logarithms else losses[0]

    def feed() -> None:
        updater.loss = build()

    updater: Any = None
    loss = build()
    updater = AdaptiveLossScalingUpdater(
        solver_of(S.Adam(0.01)), loss, feed, comm=comm, check_every=1, **options
    )
    return updater


def ended(updater: AdaptiveLossScalingUpdater) -> Dict[str, Any]:
    while updater.iteration < END:
        assert updater.update().updated
    return {"parameters": snapshot(), "solver": solver_states(updater.solver), "state": updater.state_dict()}


def check_each_rank_goes_on_from_its_own_checkpoint_bit_for_bit(comm: MPICommunicator) -> None:
    half = {"storage": "float16"}
    for options in (half, {**half, "accum_grad": 2}, {**half, "in_logarithms": True}, {"storage": None}):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "checkpoint"
            updater = training(comm, **options)
            while updater.iteration < SAVED:
                updater.update()
            save_checkpoint(path, updater)
            expected = ended(updater)
            updater = training(comm, **options)
            load_checkpoint(path, updater)
            np.testing.assert_equal(ended(updater), expected)


def check_all_ranks_go_on_from_the_checkpoint_of_one(comm: MPICommunicator) -> None:
    updater = training(comm, storage="float16")
    while updater.iteration < SAVED:
        updater.update()
    gains = updater.scaling.components.unit_amaxes()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(comm.broadcast_object(folder)) / "checkpoint"
        if comm.rank == 0:
            save_checkpoint(path, updater)
        comm.barrier()
        updater = training(comm, storage="float16")
        load_checkpoint(path, updater)
        comm.barrier()
    assert updater.scaling.components.unit_amaxes() == gains
    found = ended(updater)
    assert same_on_all(comm, {name: array.tobytes() for name, array in found["parameters"].items()})
