# SPDX-License-Identifier: Apache-2.0
"""`pytest --context`: nets are built there, tests of what it lacks skip, a lost device ends a worker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A GPU that does not come back, in the place of nnabla's.
CONFTEST = """
import pytest
from tests import context_option

lost = []
context_option.device_error = lambda context: RuntimeError("an illegal instruction") if lost else None

@pytest.fixture
def lose():
    lost.append(True)
"""
TESTS = """
import nnabla as nn

def test_backend():
    assert nn.get_current_context().backend == ["cpu:half", "cpu:float"]

def test_lacks():
    raise RuntimeError("Any of [cudnn:half] could not be found in [cpu:float]")

def test_loses(lose): pass

def test_fails():
    raise ValueError("saw 2e-7")
"""


@pytest.mark.slow
def test_a_context(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.context_option", "--rootdir", str(tmp_path)]
    command += ["-c", "/dev/null", "-p", "no:cacheprovider", "--context=cpu:half", "-n1", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert "test_loses left the device in an error state: an illegal instruction" in said, said
    assert "worker 'gw0' crashed while running 'test_it.py::test_loses'" in said
    assert "2 failed, 2 passed, 1 skipped" in said
    assert "1 failed: ValueError: saw #, such as test_it.py::test_fails" in said
    assert "1 skipped: Skipped: nnabla has no implementation" in said
