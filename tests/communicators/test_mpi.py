# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from nnabla_adaloss import MPICommunicator
from tests.mpirun import printed_by, run_checks, run_ranks

WORKERS = Path(__file__).parent / "workers"
STALLED = "no answer for 1 s in"

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


@pytest.mark.parametrize("n", [0, 2, 3])
def test_collectives(n):
    """With n = 0, without a launcher."""
    run_checks(n, WORKERS, "collectives")


@pytest.mark.parametrize("n", [2, 4])
def test_training_is_that_of_one_process_on_the_whole_batch(n):
    result = run_ranks(WORKERS / "training.py", n)
    assert result.returncode == 0, printed_by(result)
    assert result.stdout == "equal\n"


@pytest.mark.parametrize(
    ("way", "guard", "n", "told"),
    [
        ("raise", "hook", 4, "[rank 3] ValueError: the data are gone"),
        ("raise", "context", 0, "\nValueError: the data are gone\n"),
        ("exit", "context", 2, "[rank 1] SystemExit: 3"),
        ("interrupt", "hook", 2, "[rank 1] KeyboardInterrupt"),
        ("kill", "hook", 4, ""),
        ("mismatch", "hook", 4, "CollectiveMismatchError: ranks made different collective calls: entry 9"),
        (
            "stall",
            "hook",
            2,
            f"[rank 0] {STALLED} all_reduce with ranks [0, 1] (exchange 6, iteration 5)",
        ),
        ("stall_before_init", "hook", 3, f"{STALLED} init with ranks [0, 1, 2]"),
    ],
)
def test_failure_of_one_rank_ends_all_with_its_error(way, guard, n, told):
    result = run_ranks(WORKERS / "failing.py", n, way, guard)
    assert told in result.stderr, printed_by(result)
    assert result.returncode != 0, printed_by(result)
    assert way != "exit" or result.returncode == 3
    assert n or "[rank" not in result.stderr
    # The stacks of those that wait.
    assert "stall" not in way or re.search(r'File ".*mpi\.py", line \d+ in ', result.stderr)


def test_ranks_without_a_timeout_wait_as_long_as_it_takes():
    """As the documentation says of the default; three times what ends the job with a timeout of 1 s."""
    result = run_ranks(WORKERS / "failing.py", 2, "pause", "hook")
    assert result.returncode == 0, printed_by(result)
    assert "no answer" not in result.stderr


def test_missing_mpi4py_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ImportError, match=r"needs mpi4py and an MPI .*pip install nnabla-adaloss\[mpi\]"):
        MPICommunicator()
