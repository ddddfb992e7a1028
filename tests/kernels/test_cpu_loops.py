# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERFACE = Path(__file__).with_name("test_interface.py")


@pytest.mark.slow
def test_processors_that_do_not_convert_float16(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": "generic",
        "NUMBA_CPU_FEATURES": "",
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    check = "from nnabla_adaloss.kernels import cpu_loops; assert not cpu_loops.converts_halves()"
    subprocess.run([sys.executable, "-c", check], env=environment, check=True)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-k", "cpu and float16", str(INTERFACE)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout
