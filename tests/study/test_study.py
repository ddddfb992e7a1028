# SPDX-License-Identifier: Apache-2.0
"""The command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from study import EXPERIMENTS

ROOT = Path(__file__).parents[2]


def study(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "study.py"), *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=250,
    )


@pytest.mark.slow
def test_a_study_that_was_killed_is_gone_on_with(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    arguments = ("--quick", "--only=lenet", "--methods=fixed_128", "--jobs=1", f"--results={results}")
    done = study(*arguments)
    assert done.returncode == 0, done.stderr
    lines = results.read_text("utf-8").splitlines()
    assert len(lines) == 2 + 2
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG\r\n")
    results.write_text("\n".join(lines)[:-30], "utf-8")
    again = study(*arguments)
    assert "3 of 4 were there, 1 were done now" in again.stdout
    kept = results.read_text("utf-8").splitlines()
    assert kept[:3] == lines[:3]
    without_times = ("seconds",)
    old, new = (
        {k: v for k, v in json.loads(x).items() if k not in without_times} for x in (lines[3], kept[4])
    )
    assert old == new


@pytest.mark.slow
def test_no_training_begins_that_would_exceed_the_budget(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    line = {
        "net": "lenet",
        "storage": "float32",
        "weight": 1.0,
        "method": "fp32",
        "seed": 0,
        "iterations": 50,
    }
    counts = {"batches": 50, "lost": 0, "repeats": 0, "overflows": 0, "underflow": 0.0}
    rest = {"score": 0.9, **counts, "scale": 1.0, "seconds": 1000.0, "error": ""}
    results.write_text(json.dumps({**line, **rest}) + "\n", "utf-8")
    done = study("--quick", "--only=lenet", "--budget=100", f"--results={results}")
    assert done.returncode == 0, done.stderr
    assert "0 were done now" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--only=lenet,nothing", "'nothing' is unknown; choose of lenet,"),
        ("--apart --only=heads_1e-8,lenet", "'lenet' is unknown; choose of heads_1e-5,"),
        ("--apart --methods=one_scale", "--apart has storages and methods of its own"),
        ("--seeds=0", "0 is not 1 or more"),
    ],
)
def test_a_wrong_option_is_told(argument: str, message: str) -> None:
    done = study(*argument.split())
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["", *(f"--{name}" for name in EXPERIMENTS)])
def test_a_report_of_nothing(tmp_path: Path, name: str) -> None:
    done = study("--report", f"--results={tmp_path / 'results.jsonl'}", *filter(None, [name]))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("# ")
