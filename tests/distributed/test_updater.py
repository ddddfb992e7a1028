# SPDX-License-Identifier: Apache-2.0
"""The adaptive updater on several processes: what holds on every rank is checked on every rank."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Tuple

import pytest

from tests.mpirun import printed_by, run_checks, run_ranks

WORKERS = Path(__file__).parent / "workers"
THEMES = ("agreement", "delayed_statistics", "resumed")
CAUSES = {
    "kill": r"signal 9|SIGKILL|Killed",
    "feeder": r"^\[rank {last}\] OSError: the disk with the images is gone$",
    "nan": r"^\[rank \d\] .*LossScaleError: the loss of (this|another) rank is not finite in iteration 5",
}

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


@pytest.mark.parametrize(
    ("n", "themes"),
    [(2, THEMES), (4, THEMES), (3, ("overflow",)), (3, ("feeder_errors",))],
)
def test_properties_that_hold_on_every_rank(n: int, themes: Tuple[str, ...]) -> None:
    run_checks(n, WORKERS, *themes, timeout=240)


@pytest.mark.parametrize(("way", "n"), [("kill", 2), ("kill", 4), ("feeder", 2), ("nan", 2)])
def test_one_rank_that_fails_ends_the_job_with_its_error(way: str, n: int) -> None:
    result = run_ranks(WORKERS / "failing.py", n, way)
    ended = time.time()
    assert result.returncode != 0, printed_by(result)
    assert "went on to the end" not in result.stdout
    assert re.search(CAUSES[way].format(last=n - 1), result.stderr, re.M), printed_by(result)
    failed = re.search(r"^failed at ([\d.]+)$", result.stdout, re.M)
    assert way == "nan" or (failed and ended - float(failed[1]) < 10.0), printed_by(result)
