# SPDX-License-Identifier: Apache-2.0
"""A disk that is full costs a monitor its records, and the training one warning."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable, Dict, List

import numpy as np
import pytest

from nnabla_adaloss import LogMonitor, NanDump, Recorder, Recording, UpdateEnded
from tests.worlds.children import end_of, in_a_child
from tests.worlds.trainings import training, watched

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mounts as Linux does")

NOT_ALLOWED = 77
_NEW_MOUNTS, _NEW_USERS, _PRIVATE = 0x20000, 0x10000000, 0x4000 | 0x40000


def mount(folder: Path) -> None:
    """A disk of 64 KiB that only this process sees; ends the process where that is not allowed."""
    libc, user, group = ctypes.CDLL(None), os.getuid(), os.getgid()
    done = libc.unshare(_NEW_MOUNTS | (_NEW_USERS if user else 0)) == 0
    if done and user:
        for name, content in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            Path("/proc/self", name).write_text(content)
    done = done and libc.mount(b"none", b"/", None, _PRIVATE, None) == 0
    if not (done and libc.mount(b"none", os.fsencode(folder), b"tmpfs", 0, b"size=64k") == 0):
        os._exit(NOT_ALLOWED)


def fill(folder: Path) -> Path:
    """Leave no byte of the disk."""
    with open(folder / "filler", "wb", buffering=0) as file, suppress(OSError):
        while file.write(b"x" * 1024):
            pass
    return folder / "filler"


def on_a_small_disk(folder: Path, action: Callable[[], None]) -> None:
    """Run it in a process of its own, which may take a minute."""

    def run() -> None:
        signal.alarm(60)  # hangs no test
        mount(folder)
        action()

    code = end_of(in_a_child(run))
    if code == NOT_ALLOWED:
        pytest.skip("this user may not mount")
    assert code == 0


def logged(folder: Path) -> LogMonitor:
    logger = logging.getLogger("nnabla_adaloss")
    logger.addHandler(logging.FileHandler(folder / "log"))
    logger.setLevel(logging.INFO)
    logging.raiseExceptions = False  # else the standard library prints each line that is not written
    return LogMonitor(level=2)


MONITORS: Dict[str, Callable[[Path], Any]] = {
    "rows": lambda folder: Recorder(folder / "run.jsonl"),
    "TensorBoard": lambda folder: Recorder(tensorboard=folder / "board"),
    "both": lambda folder: Recorder(folder / "run.jsonl", tensorboard=folder / "board"),
    "arrays": lambda folder: NanDump(folder / "bad"),
    "log": logged,
}
WARNINGS = {"rows": 1, "TensorBoard": 1, "both": 2, "arrays": 1, "log": 0}


@pytest.mark.parametrize("kind", MONITORS)
def test_a_training_goes_on(kind: str, tmp_path: Path) -> None:
    if kind in ("TensorBoard", "both"):
        pytest.importorskip("tensorboardX")

    def trained(monitors: List[Any]) -> Any:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            train = training(overflow=[9])  # for what keeps arrays that are not finite
            watched(monitors, 12, train)
            for monitor in monitors:
                getattr(monitor, "close", lambda: None)()
        told = [str(warning.message) for warning in found if "No space left" in str(warning.message)]
        return {name: v.d.copy() for name, v in train.parameters.items()}, told

    def compared() -> None:
        monitor = MONITORS[kind](tmp_path)
        fill(tmp_path)
        expected, parameters = trained([])[0], trained([monitor])
        np.testing.assert_equal(parameters[0], expected)
        assert len(parameters[1]) == WARNINGS[kind], parameters[1]
        assert not list(tmp_path.glob("bad/*"))

    on_a_small_disk(tmp_path, compared)


@pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")
def test_files_go_on_when_there_is_room_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    from .test_tensorboard import values_in

    def recorded() -> None:
        recorder = Recorder(tmp_path / "run.jsonl", tensorboard=tmp_path / "board")
        for iteration in range(1, 4):
            recorder.on_update_ended(UpdateEnded(iteration, True, "updated", 8.0, 0, 0.5))
        filler = fill(tmp_path)
        lost = 4
        while lost == 4 or lost % 100:  # more than a page of memory has room for
            recorder.on_update_ended(UpdateEnded(lost, True, "updated", 8.0, 0, 0.5))
            lost += 1
        filler.unlink()
        recorder.on_update_ended(UpdateEnded(lost, True, "updated", 8.0, 0, 0.5))
        recorder.close()
        iterations = [row.iteration for row in Recording.load(tmp_path / "run.jsonl").of(UpdateEnded)]
        assert iterations == [*range(1, len(iterations)), lost]
        assert len(iterations) < lost
        steps = [step for tag, step in values_in(tmp_path / "board") if tag == "loss"]
        assert steps == [*range(1, len(steps)), lost]
        assert len(steps) < lost

    on_a_small_disk(tmp_path, recorded)
