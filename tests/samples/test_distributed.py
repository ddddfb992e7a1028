# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from pathlib import Path
from typing import Dict

import pytest

from tests.mpirun import run_ranks

SAMPLE = Path(__file__).parents[2] / "samples" / "distributed.py"

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


def accuracies(printed: str) -> Dict[str, float]:
    rows = re.findall(r"^  (dynamic|adaptive) +([\d.]+)%", printed, re.M)
    return {method: float(percent) for method, percent in rows}


def test_two_ranks_train_as_one_does() -> None:
    arguments = ("--method", "adaptive", "--iterations", "40")
    alone = run_ranks(SAMPLE, 0, *arguments)
    together = run_ranks(SAMPLE, 0, "--ranks", 2, *arguments, timeout=120)
    for result in (alone, together):
        assert result.returncode == 0, result.stderr
    found = [accuracies(result.stdout)["adaptive"] for result in (alone, together)]
    assert found[1] == pytest.approx(found[0], abs=3.0)
    assert found[0] > 50.0
    assert "All 2 ranks hold the same parameters" in together.stdout
    assert together.stdout.count("test accuracy") == 1


def test_four_ranks_compare_both_methods() -> None:
    result = run_ranks(SAMPLE, 4, "--iterations", "40", timeout=120)
    assert result.returncode == 0, result.stderr
    found = accuracies(result.stdout)
    assert list(found) == ["dynamic", "adaptive"]
    # Where it begins: its end may be drawn twice.
    assert len(re.findall(r"adaptive: +0%", result.stderr)) == 1, "one bar for all ranks"
    assert found["adaptive"] > found["dynamic"] - 2.0
    assert "4 ranks, 16 images each per batch" in result.stdout


def test_a_batch_that_cannot_be_shared_is_refused_once() -> None:
    result = run_ranks(SAMPLE, 2, "--batch-size", "65")
    assert result.returncode == 2
    assert result.stderr.count("--batch-size 65 cannot be shared by 2 ranks") == 1
