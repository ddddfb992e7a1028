# SPDX-License-Identifier: Apache-2.0
"""A training that can be killed at any moment and goes on from its last checkpoint."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScalingUpdater

ITERATIONS = 120
EVERY = 6


class Run(NamedTuple):
    """What a training is made of."""

    solver: Any
    updater: AdaptiveLossScalingUpdater


def make(delay: int) -> Run:
    """Return a small network under emulated fp16, that overflows in every eleventh iteration."""
    nn.clear_parameters()
    x, t, one = nn.Variable((8, 1, 6, 6)), nn.Variable((8, 1)), nn.Variable((1,))
    rng = np.random.RandomState(1)
    h = F.relu(PF.batch_normalization(PF.convolution(x, 3, (3, 3), name="conv", rng=rng), name="bn"))
    h = F.tanh(PF.affine(h, 8, name="hidden", rng=rng))
    y = PF.affine(h, 5, name="output", rng=rng)
    # sqrt has an infinite slope at 0: where ``one`` is 0, every gradient is lost.
    root = F.pow_scalar(F.reshape(F.mean(y) * 0.0, (1,)) + one, 0.5)
    loss = F.mean(F.softmax_cross_entropy(y, t)) + F.sum(root)
    solver = S.Momentum(0.05)
    solver.set_parameters(nn.get_parameters())

    fed = [0]

    def feed() -> None:
        # Data of the iteration's number and of nothing else: a run that resumes sees what it would have seen.
        data = np.random.default_rng(updater.iteration)
        x.d = data.standard_normal(x.shape)
        t.d = data.integers(0, 5, t.shape)
        again = fed[0] == updater.iteration
        one.d = float(again or updater.iteration % 11 != 0)
        fed[0] = updater.iteration

    updater = AdaptiveLossScalingUpdater(
        solver, loss, feed, scale=2.0**10, N=4, storage="float16", config=AdaLossConfig(delay=delay)
    )
    return Run(solver, updater)


def save_checkpoint(folder: Path, run: Run) -> None:
    """Write a checkpoint that is there whole or not at all, and drop the one before."""
    before = checkpoints(folder)
    unfinished = folder / "unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    nn.save_parameters(str(unfinished / "parameters.h5"))
    run.solver.save_states(str(unfinished / "solver.h5"))
    run.updater.save_states(unfinished / "scaling.json")
    os.replace(unfinished, folder / f"{run.updater.iteration:08d}")
    for old in before:
        shutil.rmtree(old)


def load_checkpoint(folder: Path, run: Run) -> None:
    """Go on from the last checkpoint, if there is one."""
    found = checkpoints(folder)
    if found:
        nn.load_parameters(str(found[-1] / "parameters.h5"))
        run.solver.load_states(str(found[-1] / "solver.h5"))
        run.updater.load_states(found[-1] / "scaling.json")


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints that are whole, the oldest first."""
    return sorted(path for path in folder.iterdir() if path.name.isdigit())


def train(folder: Path, delay: int) -> None:
    """Train to the end, from wherever ``folder`` says; leave a last checkpoint."""
    run = make(delay)
    load_checkpoint(folder, run)
    while run.updater.iteration < ITERATIONS:
        run.updater.update()
        if run.updater.iteration % EVERY == 0:
            save_checkpoint(folder, run)
