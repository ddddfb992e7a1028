# SPDX-License-Identifier: Apache-2.0
"""A disk that is full costs a monitor its records, and the training one warning."""

from __future__ import annotations

import errno
import os
import resource
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

import pytest

from nnabla_adaloss import NanDump, Recorder, Recording, UpdateEnded
from tests.worlds.trainings import training, watched
from tests.worlds.values import assert_equal, snapshot
from tests.worlds.warned import warned

FULL = os.strerror(errno.EFBIG)


@contextmanager
def no_file_larger_than(size: int) -> Iterator[None]:
    """As on a full disk, a write ends there, and the next one fails; Python ignores the signal of it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


MONITORS: Dict[str, Tuple[Callable[[Path], Any], int]] = {  # and how many warnings there are
    "files": (lambda folder: Recorder(folder / "run.jsonl", tensorboard=folder / "board"), 2),
    "arrays": (lambda folder: NanDump(folder / "bad"), 1),
}


@pytest.mark.parametrize("kind", MONITORS)
def test_a_training_goes_on(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")

    def trained(monitors: List[Any]) -> Tuple[Dict[str, Any], List[str]]:
        with warned() as texts:
            train = training(overflow=[9])  # for what keeps arrays that are not finite
            watched(monitors, 12, train)
        return snapshot(train.parameters), [text for text in texts if FULL in text]

    make, count = MONITORS[kind]
    monitor = make(tmp_path)
    expected, _ = trained([])
    with no_file_larger_than(0):
        parameters, told = trained([monitor])
    assert_equal(parameters, expected)
    assert len(told) == count, told
    assert not list(tmp_path.glob("bad/*"))


@pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")
@pytest.mark.parametrize("room", [0, 10])
def test_files_go_on_when_there_is_room_again(room: int, tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    from .test_tensorboard import values_in

    def record(iterations: range) -> None:
        for iteration in iterations:
            recorder.on_update_ended(UpdateEnded(iteration, True, "updated", 8.0, 0, 0.5))

    def sizes() -> List[int]:
        return [path.stat().st_size for path in (tmp_path / "run.jsonl", *(tmp_path / "board").iterdir())]

    recorder = Recorder(tmp_path / "run.jsonl", tensorboard=tmp_path / "board")
    record(range(1, 4))
    before = sizes()
    with no_file_larger_than(max(before) + room):  # of a row, or a record, the beginning would fit
        record(range(4, 90))
    assert max(sizes()) == max(before), "nothing of it stays"
    record(range(90, 92))
    recorder.close()
    rows = [row.iteration for row in Recording.load(tmp_path / "run.jsonl").of(UpdateEnded)]
    steps = [step for tag, step in values_in(tmp_path / "board") if tag == "loss"]
    for found in (rows, steps):
        assert found == [*range(1, len(found) - 1), 90, 91]
        assert len(found) < 91


def test_a_recorder_that_cannot_begin_a_file_leaves_none_behind(tmp_path: Path) -> None:
    (tmp_path / "existing").touch()
    for name in ("existing", "run.jsonl"):
        with no_file_larger_than(0), pytest.raises(OSError, match=FULL):
            Recorder(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="folder"):
        Recorder(tmp_path / "folder" / "run.jsonl")
    assert os.listdir(tmp_path) == ["existing"]
