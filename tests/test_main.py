# SPDX-License-Identifier: Apache-2.0
"""`python -m nnabla_adaloss`, as a user runs it, in sound environments and in broken ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import List, Sequence

import pytest

import nnabla_adaloss
from nnabla_adaloss import __main__ as program
from nnabla_adaloss.doctor import Area, Finding, Status


def run(*arguments: str, shadow: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command; packages in the folder `shadow` hide the installed ones of that name."""
    return subprocess.run(
        [sys.executable, "-m", "nnabla_adaloss", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [shadow, *sys.path]))},
        capture_output=True,
        text=True,
    )


def findings_of(process: subprocess.CompletedProcess[str], area: str) -> List[Finding]:
    return [Finding(**found) for found in json.loads(process.stdout)["findings"] if found["area"] == area]


@pytest.mark.slow
def test_usage_and_version() -> None:
    process = run()
    assert process.returncode == 2
    assert "usage: python -m nnabla_adaloss" in process.stderr
    assert run("--version").stdout == f"nnabla-adaloss {nnabla_adaloss.__version__}\n"


@pytest.mark.slow
def test_the_cpu_is_enough() -> None:
    process = run("doctor")
    assert process.stdout.startswith("CPU: works\n")
    assert "adaptive loss scaling: gradients agree with nnabla's" in process.stdout
    assert process.returncode == 0


@pytest.mark.slow
def test_what_is_asked_for_and_missing_makes_the_exit_code(tmp_path: Path) -> None:
    for empty in ("nnabla_ext/cuda/libnnabla_cuda-116_8.so", "nvidia/__init__.py", "mpi4py/__init__.py"):
        (tmp_path / empty).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / empty).touch()
    (tmp_path / "mpi4py" / "__init__.py").write_text("raise ImportError('libmpi.so.40: cannot open')")

    process = run("doctor", "--gpu", "--mpi", "--json", shadow=str(tmp_path))

    gpu = {found.subject: found.status for found in findings_of(process, "GPU")}
    assert gpu["libcublas.so.11"] in {"works", "missing"}  # a system may have CUDA 11
    assert gpu["adaptive loss scaling, half"] in {"broken", "not tried"}
    (mpi4py,) = (found for found in findings_of(process, "MPI") if found.subject == "mpi4py")
    assert (mpi4py.status, mpi4py.detail) == ("missing", "no MPI library is installed")
    assert "nnabla-adaloss[mpi]" in mpi4py.cure
    assert process.returncode == 1


@pytest.mark.parametrize(("asked", "code"), [((), 0), (("--mpi",), 1), (("--gpu", "--mpi"), 1)])
def test_all_that_is_asked_for_has_to_work(
    asked: Sequence[str], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [Finding(Area.CPU, Status.WORKS, "nnabla"), Finding(Area.MPI, Status.MISSING, "mpi4py")]
    monkeypatch.setattr(program, "examine", lambda **_: found)
    assert program.main(["doctor", *asked]) == code


@pytest.mark.slow
def test_nnabla_and_numpy_do_not_fit(tmp_path: Path) -> None:
    (tmp_path / "nnabla").mkdir()
    (tmp_path / "nnabla" / "__init__.py").write_text("raise ValueError('numpy.dtype size changed, may ...')")
    process = run("doctor", "--json", shadow=str(tmp_path))
    assert process.returncode == 1, process.stderr
    broken = {found.cure for found in findings_of(process, "CPU") if found.status == "broken"}
    assert broken == {"pip install 'numpy>=1.26,<2'"}
