# SPDX-License-Identifier: Apache-2.0
"""Imports run one way: down the floors that pyproject.toml gives to the folders, and never in a circle.

Imports for type checkers and imports inside functions count as any other.
"""

from __future__ import annotations

import os
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import List

import grimp
import pytest

ROOT = Path(__file__).parent.parent
LINT_IMPORTS = "from importlinter.cli import lint_imports_command as main; main()"


def broken_rules(folder: Path) -> str:
    """What import-linter says of the `nnabla_adaloss` in a folder; empty if our contracts are kept."""
    process = subprocess.run(
        [sys.executable, "-c", LINT_IMPORTS, "--no-cache", "--config", str(ROOT / "pyproject.toml")],
        cwd=folder,
        env={**os.environ, "COLUMNS": "250"},  # or long lines are broken
        capture_output=True,
        text=True,
    )
    return "" if process.returncode == 0 else process.stdout + process.stderr


def circles(package: str) -> List[str]:
    """One circle of imports between modules of a package for each that is found, until none is left."""
    graph = grimp.build_graph(package, cache_dir=None)
    imports = {module: sorted(graph.find_modules_directly_imported_by(module)) for module in graph.modules}
    found: List[str] = []
    while True:
        try:
            TopologicalSorter(dict(sorted(imports.items()))).prepare()
            return found
        except CycleError as error:
            circle: List[str] = error.args[1]  # each is imported by the next
        found.append(" <- ".join(circle))
        imports[circle[1]].remove(circle[0])


def test_imports_run_downwards() -> None:
    broken = broken_rules(ROOT)
    if broken:
        pytest.fail(broken, pytrace=False)


def test_no_imports_run_in_a_circle() -> None:
    assert circles("nnabla_adaloss") == []


@pytest.mark.parametrize(
    ("file", "text", "named"),
    [
        (
            "kernels/door",
            "from ..updaters import door",
            "nnabla_adaloss.kernels.door -> nnabla_adaloss.updaters",
        ),
        (
            "core/door",
            "def f():\n    from ..state import door",
            "nnabla_adaloss.core.door -> nnabla_adaloss.state",
        ),
        ("graph/door", "from nnabla_adaloss import GraphPlan", "nnabla_adaloss.graph.door -> nnabla_adaloss"),
        ("cellar/__init__", "", "nnabla_adaloss.cellar"),
    ],
)
def test_an_import_that_breaks_a_rule_is_named(tmp_path: Path, file: str, text: str, named: str) -> None:
    package = tmp_path / "nnabla_adaloss"
    rooms = [path.stem for path in (ROOT / "nnabla_adaloss").glob("[a-z]*") if path.suffix in {"", ".py"}]
    for module in [
        "__init__",
        "__main__",
        *(f"{room}/{name}" for room in rooms for name in ("__init__", "door")),
    ]:
        (package / module).parent.mkdir(parents=True, exist_ok=True)
        (package / f"{module}.py").touch()
    assert broken_rules(tmp_path) == ""
    (package / f"{file}.py").parent.mkdir(exist_ok=True)
    (package / f"{file}.py").write_text(text, "utf-8")
    assert named in broken_rules(tmp_path)
