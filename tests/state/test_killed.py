# SPDX-License-Identifier: Apache-2.0
"""Killed with SIGKILL at random moments, a training ends bit for bit where it would have ended."""

from __future__ import annotations

import logging
import os
import random
import signal
import time
import traceback
from pathlib import Path
from typing import Dict

import h5py
import numpy as np
import pytest

from nnabla_adaloss.state import read_state
from tests.state.workers import train as worker

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")]

KILLS = 25  # of 50: per delay


def start(folder: Path, delay: int) -> int:
    """Train in a process of its own, without the seconds that importing everything again takes."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    logging.getLogger("nnabla").setLevel(logging.WARNING)
    try:
        worker.train(folder, delay)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def finish(pid: int, within: float) -> bool:
    """Wait so long, then kill; return whether the process came to its end before."""
    until = time.monotonic() + within
    while time.monotonic() < until:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            assert os.waitstatus_to_exitcode(status) == 0
            return True
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return False
    assert os.waitstatus_to_exitcode(status) == 0
    return True


def arrays(path: Path) -> Dict[str, np.ndarray]:
    found: Dict[str, np.ndarray] = {}
    with h5py.File(path, "r") as file:
        file.visititems(lambda name, item: found.update({name: item[()]}) if hasattr(item, "shape") else None)
    return found


def compare(folder: Path, expected: Path) -> None:
    # One that was killed between its last checkpoint and the end of the one before has two.
    ours, theirs = worker.checkpoints(folder)[-1], worker.checkpoints(expected)[-1]
    assert ours.name == theirs.name
    for name in ("parameters.h5", "solver.h5"):
        left, right = arrays(ours / name), arrays(theirs / name)
        assert left.keys() == right.keys()
        assert left
        for key, value in right.items():
            np.testing.assert_array_equal(left[key], value, err_msg=f"{name}: {key}")
    assert read_state(ours / "scaling.json") == read_state(theirs / "scaling.json")


@pytest.mark.parametrize("delay", [0, 1])
def test_a_run_that_is_killed_again_and_again_ends_where_it_would_have_ended(
    tmp_path: Path, delay: int
) -> None:
    warm = worker.make(delay)
    for _ in range(12):  # with an overflow: every kernel is compiled here, and not in each process
        warm.updater.update()
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    began = time.monotonic()
    assert finish(start(undisturbed, delay), within=120.0)
    duration = time.monotonic() - began
    state = read_state(worker.checkpoints(undisturbed)[-1] / "scaling.json")
    assert state["scaling"]["components"]["windows"]
    assert state["last_good_scale"] != 2.0**10  # the scale has moved

    rng = random.Random(delay)
    kills = runs = 0
    while kills < KILLS:
        runs += 1
        folder = tmp_path / f"run{runs}"
        folder.mkdir()
        longest = duration / 4.0
        while not finish(start(folder, delay), within=rng.uniform(0.0, longest)):
            kills += 1
            longest *= 1.1  # so that it ends on a machine that became slow, too
        compare(folder, undisturbed)
