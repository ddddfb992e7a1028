# SPDX-License-Identifier: Apache-2.0
"""Killed at random moments, a training ends bit for bit where it would have ended."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path
from threading import Timer
from typing import Dict, List

import h5py
import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScalingUpdater
from nnabla_adaloss.state import read_state
from tests.worlds.children import end_of, in_a_child
from tests.worlds.networks import gate
from tests.worlds.trainings import updater_of
from tests.worlds.values import assert_equal

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")]

KILLS = 25  # of 50: per delay
ITERATIONS = 120
EVERY = 6


def updater_with(delay: int) -> AdaptiveLossScalingUpdater:
    """Of a small network under emulated fp16, that overflows in every eleventh iteration."""
    nn.clear_parameters()
    x, t, one = nn.Variable((8, 1, 6, 6)), nn.Variable((8, 1)), nn.Variable((1,))
    rng, fed = np.random.RandomState(1), [0]
    h = F.relu(PF.batch_normalization(PF.convolution(x, 3, (3, 3), name="conv", rng=rng), name="bn"))
    h = F.tanh(PF.affine(h, 8, name="hidden", rng=rng))
    y = PF.affine(h, 5, name="output", rng=rng)
    loss = F.mean(F.softmax_cross_entropy(y, t)) + gate(y, one)

    def feed() -> None:
        # Data of the iteration's number and of nothing else: a run that resumes sees what it would have seen.
        data = np.random.default_rng(updater.iteration)
        x.d, t.d = data.standard_normal(x.shape), data.integers(0, 5, t.shape)
        again = fed[0] == updater.iteration
        one.d = float(again or updater.iteration % 11 != 0)
        fed[0] = updater.iteration

    config = AdaLossConfig(delay=delay)
    updater = updater_of(loss, feed, solver=S.Momentum(0.05), scale=2.0**10, N=4, config=config)
    return updater


def checkpoints(folder: Path) -> List[Path]:
    """The checkpoints that are whole, the oldest first."""
    return sorted(path for path in folder.iterdir() if path.name.isdigit())


def train(folder: Path, delay: int) -> None:
    """Train to the end from the last checkpoint, if there is one; leave another, drop those before."""
    updater, found = updater_with(delay), checkpoints(folder)
    if found:
        nn.load_parameters(str(found[-1] / "parameters.h5"))
        updater.solver.load_states(str(found[-1] / "solver.h5"))
        updater.load_states(found[-1] / "scaling.json")
    while updater.iteration < ITERATIONS:
        updater.update()
        if updater.iteration % EVERY == 0:
            found, unfinished = checkpoints(folder), folder / "unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            nn.save_parameters(str(unfinished / "parameters.h5"))
            updater.solver.save_states(str(unfinished / "solver.h5"))
            updater.save_states(unfinished / "scaling.json")
            os.replace(unfinished, folder / f"{updater.iteration:08d}")
            for old in found:
                shutil.rmtree(old)


def finish(folder: Path, delay: int, within: float) -> bool:
    """Train in a child that is killed after so long; return whether it came to its end before."""
    pid = in_a_child(lambda: train(folder, delay))
    killer = Timer(within, os.kill, (pid, signal.SIGKILL))
    killer.start()
    code = end_of(pid)
    killer.cancel()
    assert code in (0, -signal.SIGKILL)
    return code == 0


def arrays(path: Path) -> Dict[str, np.ndarray]:
    found: Dict[str, np.ndarray] = {}
    with h5py.File(path, "r") as file:
        file.visititems(lambda name, item: found.update({name: item[()]}) if hasattr(item, "shape") else None)
    return found


def compare(folder: Path, expected: Path) -> None:
    # One that was killed between its last checkpoint and the end of the one before has two.
    ours, theirs = checkpoints(folder)[-1], checkpoints(expected)[-1]
    assert ours.name == theirs.name
    for name in ("parameters.h5", "solver.h5"):
        left, right = arrays(ours / name), arrays(theirs / name)
        assert left.keys() == right.keys()
        assert left
        assert_equal(left, right)
    assert read_state(ours / "scaling.json") == read_state(theirs / "scaling.json")


@pytest.mark.parametrize("delay", [0, 1])
def test_a_run_that_is_killed_again_and_again_ends_where_it_would_have_ended(
    tmp_path: Path, delay: int
) -> None:
    warm = updater_with(delay)
    for _ in range(12):  # with an overflow: every kernel is compiled here, and not in each process
        warm.update()
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    began = time.monotonic()
    assert finish(undisturbed, delay, within=120.0)
    duration = time.monotonic() - began
    state = read_state(checkpoints(undisturbed)[-1] / "scaling.json")
    assert state["scaling"]["components"]["windows"]
    assert state["last_good_scale"] != 2.0**10  # the scale has moved

    rng = random.Random(delay)
    kills = runs = 0
    while kills < KILLS:
        runs += 1
        folder = tmp_path / f"run{runs}"
        folder.mkdir()
        longest = duration / 4.0
        while not finish(folder, delay, within=rng.uniform(0.001, longest)):
            kills += 1
            longest *= 1.1  # so that it ends on a machine that became slow, too
        compare(folder, undisturbed)
