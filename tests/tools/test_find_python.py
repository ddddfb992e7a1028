# SPDX-License-Identifier: Apache-2.0
"""The search for a Python, on made-up machines: a PATH and a pyenv of this test's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "find_python.sh"
THIS = "{}.{}".format(*sys.version_info[:2])
OTHER = "3.9" if THIS != "3.9" else "3.10"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sh").symlink_to("/bin/sh")
    return tmp_path


def add(path: Path, program: str = f'exec {sys.executable} "$@"') -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{program}\n")
    path.chmod(0o755)


def find(machine: Path, *versions: str) -> str:
    """What the script prints on a machine; empty if it finds nothing."""
    environment = {"PATH": str(machine / "bin"), "PYENV_ROOT": str(machine / "pyenv"), "HOME": str(machine)}
    process = subprocess.run(
        ["/bin/sh", str(SCRIPT), *versions], env=environment, capture_output=True, text=True
    )
    assert (process.returncode == 0) == bool(process.stdout)
    return process.stdout.strip()


@pytest.mark.parametrize("place", [f"bin/python{THIS}", "bin/python3", f"pyenv/versions/{THIS}.7/bin/python"])
def test_each_place_is_searched(machine: Path, place: str) -> None:
    add(machine / place)
    assert os.path.samefile(find(machine, OTHER, THIS), sys.executable)


def test_a_python_of_another_version_does_not_count(machine: Path) -> None:
    add(machine / "bin" / "python3")
    assert find(machine, OTHER) == ""


def test_a_shim_that_fails_does_not_count(machine: Path) -> None:
    add(machine / "bin" / f"python{THIS}", "echo 'pyenv: command not found' >&2; exit 127")
    assert find(machine, THIS) == ""
    add(machine / "pyenv" / "versions" / f"{THIS}.7" / "bin" / "python")
    assert os.path.samefile(find(machine, THIS), sys.executable)


def test_the_first_version_is_preferred(machine: Path) -> None:
    add(machine / "bin" / f"python{THIS}", "echo preferred")
    add(machine / "bin" / "python3", "echo other")
    assert find(machine, THIS, OTHER) == "preferred"
