# SPDX-License-Identifier: Apache-2.0
"""Two checkouts beside each other: a dear iteration in eight counts, and each trains with its own package."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tools.compare_speed import Spread, argument, compared, main

ROOT = Path(__file__).parents[2]

# One iteration in eight computes for some milliseconds more, as one that measures might.
DEARER = """

def _dearer(update):
    def run(self):
        if self.iteration % 8 == 0:
            sum(range(300_000))
        return update(self)
    return run

AdaptiveLossScalingUpdater.update = _dearer(AdaptiveLossScalingUpdater.update)
"""


def test_columns_are_ratios_of_blocks_that_ran_side_by_side() -> None:
    # The machine was three times as slow in the second round: no ratio shows it.
    taken = {
        ("old", "dynamic"): [1.0, 3.0],
        ("old", "adaptive"): [2.0, 6.0],
        ("new", "dynamic"): [1.0, 3.0],
        ("new", "adaptive"): [1.5, 4.5],
    }
    expected = {"old": 2.0, "new": 1.5, "new over old": 0.75, "control": 1.0}
    assert compared(taken) == {name: Spread(x, x, x) for name, x in expected.items()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tests", "."], "tests holds no nnabla_adaloss"),
        ([".", ".", "lenett"], "unknown case: lenett"),
        ([".", ".", "--new", "delay"], "'delay' must be NAME=VALUE"),
    ],
)
def test_errors_come_before_anything_runs(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err
    assert [argument(text)[1] for text in ("a=1", "a=next", "a=None")] == [1, "next", None]


@pytest.mark.slow
def test_one_dear_iteration_in_eight_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(ROOT / "nnabla_adaloss", tmp_path / "nnabla_adaloss")
    with (tmp_path / "nnabla_adaloss/updaters/adaptive.py").open("a", encoding="utf-8") as file:
        file.write(DEARER)
    main([str(ROOT), str(tmp_path), "chain-10x8", "--seconds", "0.5"])
    line = capsys.readouterr().out.splitlines()[-1]
    _, _, new_over_old, control, _ = re.findall(r"(\d+\.\d+)(?: \(|\s|$)", line)
    assert float(new_over_old) > 1.3
    assert float(control) < 1.3
