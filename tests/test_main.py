# SPDX-License-Identifier: Apache-2.0
"""`python -m nnabla_adaloss`, as a user runs it, in sound environments and in broken ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Sequence

import pytest

import nnabla_adaloss
from nnabla_adaloss import __main__ as program
from nnabla_adaloss.doctor.findings import Finding


def run(*arguments: str, shadow: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command; packages in the folder `shadow` hide the installed ones of that name."""
    return subprocess.run(
        [sys.executable, "-m", "nnabla_adaloss", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [shadow, *sys.path]))},
        capture_output=True,
        text=True,
    )


def test_nobody_reads_on(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with open(writes, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        monkeypatch.setattr(program, "examine", lambda **asked: [])
        assert program.main(["doctor"]) == 1
        closed.flush()


@pytest.mark.slow
def test_commands_in_a_sound_environment() -> None:
    process = run()
    assert process.returncode == 2
    assert "usage: python -m nnabla_adaloss" in process.stderr
    assert run("--version").stdout == f"nnabla-adaloss {nnabla_adaloss.__version__}\n"
    process = run("doctor")
    assert process.stdout.startswith("CPU: works\n")
    assert "adaptive loss scaling: gradients agree with nnabla's" in process.stdout
    assert process.returncode == 0


@pytest.mark.slow
def test_the_doctor_in_a_broken_environment(tmp_path: Path) -> None:
    for package, error in (
        ("nnabla", "ValueError('numpy.dtype size changed, may ...')"),
        ("mpi4py", "ImportError('libmpi.so.40: cannot open')"),
    ):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(f"raise {error}")
    process = run("doctor", "--json", shadow=str(tmp_path))
    assert process.returncode == 1, process.stderr
    cures = {
        (found["area"], found["status"]): found["cure"] for found in json.loads(process.stdout)["findings"]
    }
    assert cures["CPU", "broken"] == "pip install 'numpy>=1.26,<2'"
    assert "nnabla-adaloss[mpi]" in cures["MPI", "missing"]


@pytest.mark.parametrize(("asked", "code"), [((), 0), (("--mpi",), 1), (("--gpu", "--mpi"), 1)])
def test_all_that_is_asked_for_has_to_work(
    asked: Sequence[str], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [Finding("CPU", "works", "nnabla"), Finding("MPI", "missing", "mpi4py")]
    monkeypatch.setattr(program, "examine", lambda **_: found)
    assert program.main(["doctor", *asked]) == code
