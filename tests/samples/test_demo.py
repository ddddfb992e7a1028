# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, str(ROOT / "samples" / "demo.py"), *arguments],
        env={**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
    )


@pytest.mark.slow
def test_small_demo(tmp_path: Path) -> None:
    arguments = ("--iterations", "150", "--networks", "two_losses", "--loss-weights", "1", "1e-12")
    done = demo(*arguments, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = {line[:15].strip(): line[15:] for line in done.stdout.split("\n\n")[0].splitlines()}
    methods = ("dynamic", "dynamic (65536)", "one measured", "adaptive")
    assert rows["loss weight"].split() == ["1:1", "1:1e-12"]
    assert rows["adaptive"].count("✓") == 2
    for method in methods[:-1]:
        assert rows[method].count("✓") == 1, method
        assert rows[method].endswith("✗"), method
    last_lines = done.stdout.split("\n\n")[2].splitlines()
    assert [line[:16].strip() for line in last_lines] == list(methods)
    assert last_lines[-1].endswith("works untouched in 2 of 2, 0 batches thrown away")
    assert f"Picture: {tmp_path / 'demo.png'}" in done.stdout
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.slow
def test_one_loss_as_small_as_1e_minus_9(tmp_path: Path) -> None:
    arguments = ("--iterations", "100", "--networks", "mlp", "--loss-weights", "1e-9")
    done = demo(*arguments, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = {line[:15].strip(): line[15:] for line in done.stdout.split("\n\n")[0].splitlines()}
    assert rows["dynamic"].endswith("✗")
    assert rows["one measured"].endswith("✓")
    assert rows["adaptive"].endswith("✓")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dynamic (65536)", "adaptive"])
def test_one_seed_gives_one_score(method: str) -> None:
    from common.digits import load
    from demo import train
    from training import Settings

    counted = []

    def score(seed: int) -> object:
        return train("mlp", 1.0, method, load(), Settings(20, seed), counted.append)

    first = score(seed=3)
    assert sum(counted) == 20
    assert first == score(seed=3)
    assert first != score(seed=4)


def test_help_says_what_is_compared_and_how() -> None:
    printed = demo("--help").stdout
    for text in (
        "--loss-weights",
        "--out",
        "--seed",
        "learning rate is divided",
        "DynamicLossScalingUpdater",
        "How to read the table",
        "demo.png",
    ):
        assert text in printed


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--iterations", "0", "0 is not 1 or more"),
        ("--loss-weights", "-1", "-1 is not positive and finite"),
        ("--loss-weights", "0", "0 is not positive and finite"),
        ("--loss-weights", "inf", "inf is not positive and finite"),
    ],
)
def test_wrong_option_is_refused(option: str, value: str, message: str) -> None:
    done = demo(option, value)
    assert done.returncode == 2
    assert f"{option}: {message}" in done.stderr
