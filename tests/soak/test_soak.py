# SPDX-License-Identifier: Apache-2.0
"""Thousands of iterations in one process: nothing grows, nothing is left behind.

ADALOSS_SOAK_ITERATIONS=20000 runs as many instead of 4,000. The process is one of its own: what the test
runner keeps would hide a small leak.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "workers" / "training.py"
REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0, 1])
def test_nothing_grows(tmp_path: Path, delay: int) -> None:
    run = subprocess.run(
        [sys.executable, str(WORKER), str(delay)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert os.listdir(tmp_path) == []
