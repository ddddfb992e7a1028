# SPDX-License-Identifier: Apache-2.0
"""Overflows that no rank, or one rank alone, can see in its own gradients."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Callable

import pytest

WORKERS = Path(__file__).parent / "workers"

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


@pytest.mark.parametrize("n", [2, 3])
def test_all_ranks_throw_the_batch_away(
    mpirun: Callable[..., subprocess.CompletedProcess[str]], n: int
) -> None:
    result = mpirun(WORKERS / "checks.py", n, "exchange_cases")
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    source = (WORKERS / "exchange_cases.py").read_text("utf-8")
    assert result.stdout.split() == re.findall(r"^def (check_\w+)", source, re.M)
