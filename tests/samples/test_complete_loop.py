# SPDX-License-Identifier: Apache-2.0
"""The complete loop ends bit for bit where it would have ended, wherever it is killed."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import complete_loop
import nnabla as nn
import numpy as np
import pytest

from tests.worlds.children import end_of, in_a_child

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")]


def train(*arguments: str) -> None:
    nn.clear_parameters()
    assert complete_loop.main(["--epochs", "4", *arguments]) == 0


def killed_in_update(number: int, checkpoint: Path) -> None:
    """Train in a process that gets SIGKILL in its nth update."""
    update, calls = complete_loop.AdaptiveLossScalingUpdater.update, iter(range(number))

    def killing(updater: complete_loop.AdaptiveLossScalingUpdater) -> object:
        if next(calls, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return update(updater)

    def action() -> None:
        complete_loop.AdaptiveLossScalingUpdater.update = killing  # type: ignore[method-assign,assignment]
        train("--checkpoint", str(checkpoint))

    assert end_of(in_a_child(action)) == -signal.SIGKILL


def test_killed_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train("--checkpoint", str(whole))
    for number in (30, 41):
        killed_in_update(number, killed)
    train("--checkpoint", str(killed))
    with np.load(whole) as expected, np.load(killed) as found:
        assert expected.files == found.files
        assert all(np.array_equal(expected[name], found[name]) for name in expected.files)
    best = re.findall("best epoch .*", capsys.readouterr().out)
    assert len(best) == 2
    assert best[0] == best[1]


def test_it_ends_early_and_has_learned(capsys: pytest.CaptureFixture[str]) -> None:
    nn.clear_parameters()
    assert complete_loop.main([]) == 0
    epoch, last, accuracy = map(float, re.findall(r"[\d.]+", capsys.readouterr().out))
    assert last == epoch + 6 < 40
    assert accuracy > 98.0
