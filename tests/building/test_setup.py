# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Dict

import pytest

ROOT = Path(__file__).parent.parent.parent

ASK = """
import runpy, setuptools
setuptools.setup = lambda **given: print(given["setup_requires"])
runpy.run_path("setup.py")
"""


def needed(environment: Dict[str, str]) -> str:
    command = [sys.executable, "-W", "ignore", "-c", ASK]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return run.stdout.strip()


@pytest.mark.slow
def test_a_compiler_is_asked_for_only_where_there_is_none(tmp_path: Path) -> None:
    assert needed({"PATH": str(tmp_path), "CC": "gcc"}) == "[]"
    assert needed({"PATH": str(tmp_path)}) == "['ziglang>=0.13']"
