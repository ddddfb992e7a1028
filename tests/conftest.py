# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Callable

import pytest

from tests.mpirun import run_ranks


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "mpi: starts several processes with mpirun")


@pytest.fixture
def mpirun() -> Callable[..., object]:
    """`mpirun(script, n, *args, timeout=60)` runs a script on n ranks; see `tests.mpirun.run_ranks`."""
    return run_ranks
