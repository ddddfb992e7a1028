# SPDX-License-Identifier: Apache-2.0
"""`pytest --context`: nets are built there, tests of what it lacks skip, a lost device ends a worker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

TESTS = """
import nnabla as nn
import pytest

def test_backend():
    assert nn.get_current_context().backend == ["cpu:half", "cpu:float"]

def test_lacks():
    raise RuntimeError("Any of [cudnn:half] could not be found in [cpu:float]")

@pytest.mark.parametrize("seen", [1.5, 2e-7])
def test_fails(seen):
    raise ValueError(f"saw {seen}")
"""

# A GPU that does not come back, in the place of nnabla's.
LOST = """
import pytest
from tests import context_option

lost = []

def device_error(context):
    return RuntimeError("an illegal instruction was encountered") if lost else None

context_option.device_error = device_error

@pytest.fixture
def lose():
    lost.append(True)
"""

LOSES = """
def test_before(): pass
def test_loses(lose): pass
def test_after(): pass
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "tests.context_option", "--rootdir", str(folder)]
    command += ["-c", "/dev/null", "-p", "no:cacheprovider", *arguments, str(folder)]
    return subprocess.run(
        command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120
    )


@pytest.mark.slow
def test_nets_are_built_there_and_reasons_are_counted(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    done = run(tmp_path, "--context=cpu:half")
    assert "1 skipped" in done.stdout, done.stdout + done.stderr
    assert "2 failed, 1 passed, 1 skipped" in done.stdout
    assert "2 failed: ValueError: saw #, such as test_it.py::test_fails[1.5]" in done.stdout
    assert "1 skipped: Skipped: nnabla has no implementation" in done.stdout


@pytest.mark.slow
def test_without_the_option_nothing_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    done = run(tmp_path)
    assert "4 failed" in done.stdout, done.stdout + done.stderr
    assert "by reason" not in done.stdout


@pytest.mark.slow
def test_a_context_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = run(tmp_path, "--context=cpu:float7")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--context=cpu:float7 cannot be used here" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_device_that_is_gone_ends_its_worker_and_not_the_run(tmp_path: Path, workers: str) -> None:
    (tmp_path / "conftest.py").write_text(LOST)
    (tmp_path / "test_it.py").write_text(LOSES)
    done = run(tmp_path, "--context=cpu:half", "-n", workers)
    said = done.stdout + done.stderr
    assert "test_it.py::test_loses left the device in an error state: an illegal instruction" in said, said
    if workers == "0":
        assert done.returncode == 3
        assert "`-n 1` goes on" in said
    else:
        assert "worker 'gw0' crashed while running 'test_it.py::test_loses'" in said
        assert "1 failed, 3 passed" in said, said
