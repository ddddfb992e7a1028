# SPDX-License-Identifier: Apache-2.0
"""Imports run one way: down the floors that pyproject.toml gives to the folders, and never in a circle.

Imports for type checkers and imports inside functions count as any other.
"""

from __future__ import annotations

import os
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

LINT_IMPORTS = "from importlinter.cli import lint_imports_command as main; main()"


def test_imports_run_downwards() -> None:
    process = subprocess.run(
        [sys.executable, "-c", LINT_IMPORTS, "--no-cache"],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "COLUMNS": "250"},  # or long lines are broken
        capture_output=True,
        text=True,
    )
    if process.returncode != 0:
        pytest.fail(process.stdout + process.stderr, pytrace=False)


def test_no_imports_run_in_a_circle() -> None:
    graph = grimp.build_graph("nnabla_adaloss", cache_dir=None)
    # CycleError names the modules of a circle.
    TopologicalSorter({m: graph.find_modules_directly_imported_by(m) for m in graph.modules}).prepare()
