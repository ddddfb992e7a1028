# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "make_venv.sh"
THIS = "{}.{}".format(*sys.version_info[:2])

pytestmark = pytest.mark.slow


def make_venv(directory: Path, machine: Path, *versions: str) -> subprocess.CompletedProcess[str]:
    """Run the script on a machine whose own programs come before the system's, and that has no pyenv."""
    environment = {"PATH": f"{machine}:/usr/bin:/bin", "PYENV_ROOT": str(machine), "HOME": str(machine)}
    command = ["/bin/sh", str(SCRIPT), str(directory), *versions]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_made_once_and_kept(tmp_path: Path) -> None:
    program(tmp_path / f"python{THIS}", f'exec {sys.executable} "$@"')
    venv = tmp_path / "venv"
    assert "Making" in make_venv(venv, tmp_path, THIS).stdout
    assert (venv / "bin" / "pip").exists()
    (venv / "kept").touch()
    assert "Using" in make_venv(venv, tmp_path, "3.8", THIS).stdout
    assert (venv / "kept").exists()


def test_uv_is_asked_for_what_is_not_there(tmp_path: Path) -> None:
    # A uv that "downloads" this very Python, for whatever version it is asked.
    program(
        tmp_path / "uv", f'[ "$1 $3" = "python 3.7" ] || exit 1\n[ "$2" = install ] || echo {sys.executable}'
    )
    process = make_venv(tmp_path / "venv", tmp_path, "3.7", "3.6")
    assert "No Python 3.7 or 3.6 on this machine: asking uv to download Python 3.7." in process.stdout
    assert process.returncode == 0
    assert (tmp_path / "venv" / "bin" / "python").exists()


def test_failure_says_what_to_install(tmp_path: Path) -> None:
    program(tmp_path / "uv", "exit 2")
    process = make_venv(tmp_path / "venv", tmp_path, "3.7")
    assert "Python 3.7 could not be had. Install it" in process.stderr
    assert process.returncode == 1
    assert not (tmp_path / "venv").exists()
