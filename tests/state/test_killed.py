# SPDX-License-Identifier: Apache-2.0
"""Killed at random moments, a training ends bit for bit where it would have ended."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from threading import Timer

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScalingUpdater, load_checkpoint, save_checkpoint
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


def train(last: Path, delay: int) -> None:
    """Train to the end from the last checkpoint, if there is one."""
    updater = updater_with(delay)
    if last.exists():
        load_checkpoint(last, updater)
    while updater.iteration < ITERATIONS:
        updater.update()
        if updater.iteration % EVERY == 0:
            save_checkpoint(last, updater)


def finish(last: Path, delay: int, within: float) -> bool:
    """Train in a child that is killed after so long; return whether it came to its end before."""
    pid = in_a_child(lambda: train(last, delay))
    killer = Timer(within, os.kill, (pid, signal.SIGKILL))
    killer.start()
    code = end_of(pid)
    killer.cancel()
    assert code in (0, -signal.SIGKILL)
    return code == 0


@pytest.mark.parametrize("delay", [0, 1])
def test_a_run_that_is_killed_again_and_again_ends_where_it_would_have_ended(
    tmp_path: Path, delay: int
) -> None:
    warm = updater_with(delay)
    for _ in range(12):  # with an overflow: every kernel is compiled here, and not in each process
        warm.update()
    undisturbed = tmp_path / "undisturbed"
    began = time.monotonic()
    assert finish(undisturbed, delay, within=120.0)
    duration = time.monotonic() - began
    ended = updater_with(delay)
    load_checkpoint(undisturbed, ended)
    assert ended.iteration == ITERATIONS
    assert ended.counters.repeats > ITERATIONS // 11

    rng = random.Random(delay)
    kills = runs = 0
    while kills < KILLS:
        runs += 1
        last, longest = tmp_path / f"run{runs}", duration / 4.0
        while not finish(last, delay, within=rng.uniform(0.001, longest)):
            kills += 1
            longest *= 1.1  # so that it ends on a machine that became slow, too
        with np.load(undisturbed) as expected, np.load(last) as found:
            assert_equal(dict(found), dict(expected))
