# SPDX-License-Identifier: Apache-2.0
"""The making of environments, on made-up machines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "make_venv.sh"
THIS = "{}.{}".format(*sys.version_info[:2])

pytestmark = pytest.mark.slow


def make_venv(directory: Path, machine: Path, *versions: str) -> subprocess.CompletedProcess[str]:
    """Run the script on a machine whose own programs come before the system's."""
    environment = {"PATH": f"{machine}:/usr/bin:/bin", "HOME": str(machine)}
    command = ["/bin/sh", str(SCRIPT), str(directory), *versions]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_made_once_and_kept(tmp_path: Path) -> None:
    program(tmp_path / f"python{THIS}", f'exec {sys.executable} "$@"')
    venv = tmp_path / "venv"
    assert f"Making {venv} with Python {THIS}." in make_venv(venv, tmp_path, "3.7", THIS).stdout
    assert (venv / "bin" / "pip").exists()
    (venv / "kept").touch()
    assert "Using" in make_venv(venv, tmp_path, "3.8", THIS).stdout
    assert (venv / "kept").exists()


def test_a_python_of_pyenv_that_is_not_active(tmp_path: Path) -> None:
    shim = f'[ "$PYENV_VERSION" = {THIS} ] || exit 127\nexec {sys.executable} "$@"'
    program(tmp_path / f"python{THIS}", shim)
    assert "Making" in make_venv(tmp_path / "venv", tmp_path, THIS).stdout


def test_uv_makes_it_where_it_is(tmp_path: Path) -> None:
    # A uv that has this Python, by the name of 3.6 alone.
    asked = "venv --quiet --clear --seed --python cpython@3.6"
    program(tmp_path / "uv", f'case "$*" in "{asked} "*) exec {sys.executable} -m venv "$7"; esac; exit 2')
    program(tmp_path / f"python{THIS}", "echo not asked; exit 1")
    process = make_venv(tmp_path / "venv", tmp_path, "3.7", "3.6")
    assert f"Making {tmp_path / 'venv'} with Python {THIS}." in process.stdout
    assert process.returncode == 0


def test_uv_is_fetched_without_uv_and_python(tmp_path: Path) -> None:
    # A python3 that makes an environment whose pip installs a uv, which makes one of this Python.
    program(tmp_path / "fetched_uv", f'exec {sys.executable} -m venv "$7"')
    program(tmp_path / "pip", f'cp {tmp_path}/fetched_uv "$(dirname "$0")/uv"')
    venv = f'[ "$1 $2" = "-m venv" ] && mkdir -p "$3/bin" && cp {tmp_path}/pip "$3/bin/python"'
    program(tmp_path / "python3", venv)
    process = make_venv(tmp_path / "venv", tmp_path, "3.7", "3.6")
    assert "No Python 3.7 or 3.6 on the PATH: asking uv for one." in process.stdout
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "venv" / "bin" / "pip").exists()


def test_failure_names_the_package_to_install(tmp_path: Path) -> None:
    program(tmp_path / "uv", "exit 2")
    process = make_venv(tmp_path / "venv", tmp_path, "3.7")
    assert "Python 3.7 could not be had. Install one" in process.stderr
    assert process.returncode == 1
    assert not (tmp_path / "venv").exists()
