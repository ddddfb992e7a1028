# SPDX-License-Identifier: Apache-2.0
"""The adaptive updater on several processes: what holds on every rank is checked on every rank."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path
from typing import Any, Callable, Tuple

import pytest

WORKERS = Path(__file__).parent / "workers"
THEMES = ("equal_ranks", "delayed_statistics", "overflow", "disagreement")
MEASURED = ("measured",)
CAUSES = {
    "kill": r"signal 9|SIGKILL|Killed",
    "feeder": r"^\[rank {last}\] OSError: the disk with the images is gone$",
    "nan": r"^\[rank \d\] .*LossScaleError: the loss of (this|another) rank is not finite in iteration 5",
}
Launch = Callable[..., "subprocess.CompletedProcess[str]"]

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


def printed_by(result: subprocess.CompletedProcess[Any]) -> str:
    return f"{result.args} returned {result.returncode}\n{result.stdout}\n{result.stderr}"


@pytest.mark.parametrize(("n", "themes"), [(2, THEMES), (4, THEMES), (2, MEASURED), (3, MEASURED)])
def test_what_holds_on_every_rank(mpirun: Launch, n: int, themes: Tuple[str, ...]) -> None:
    """One launch for all checks: starting the ranks takes longer than most of them."""
    result = mpirun(WORKERS / "checks.py", n, *themes, timeout=240)
    assert result.returncode == 0, printed_by(result)
    sources = "".join((WORKERS / f"{theme}.py").read_text("utf-8") for theme in themes)
    assert result.stdout.split() == re.findall(r"^def (check_\w+)", sources, re.M)


@pytest.mark.parametrize("n", [2, 3])
def test_one_rank_whose_data_feeder_fails_now_and_then(mpirun: Launch, n: int) -> None:
    result = mpirun(WORKERS / "checks.py", n, "feeder_errors", timeout=120)
    assert result.returncode == 0, printed_by(result)
    source = (WORKERS / "feeder_errors.py").read_text("utf-8")
    assert result.stdout.split() == re.findall(r"^def (check_\w+)", source, re.M)


@pytest.mark.parametrize(("way", "n"), [("kill", 2), ("kill", 4), ("feeder", 2), ("nan", 2)])
def test_one_rank_that_fails_ends_the_job_with_its_error(mpirun: Launch, way: str, n: int) -> None:
    result = mpirun(WORKERS / "failing.py", n, way)
    ended = time.time()
    assert result.returncode != 0, printed_by(result)
    assert "went on to the end" not in result.stdout
    assert re.search(CAUSES[way].format(last=n - 1), result.stderr, re.M), printed_by(result)
    failed = re.search(r"^failed at ([\d.]+)$", result.stdout, re.M)
    assert way == "nan" or (failed and ended - float(failed[1]) < 10.0), printed_by(result)
