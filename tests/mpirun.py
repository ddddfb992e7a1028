# SPDX-License-Identifier: Apache-2.0
"""Runs a script, or the checks of modules, on several MPI ranks of this machine."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from nnabla_adaloss.doctor.probes import MPI_PERMISSIONS

REPOSITORY = Path(__file__).resolve().parents[1]

# `self,sm`: shared memory alone. Looking for network interfaces would take a second at every start.
ENVIRONMENT = {
    **MPI_PERMISSIONS,
    "OMPI_MCA_btl": "self,sm",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(REPOSITORY),
}


def run_ranks(
    script: str | Path, n: int, *args: object, timeout: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Run a Python script on `n` ranks and wait for all of them; 0 runs it by itself, without a launcher.

    After `timeout` seconds the job is killed, and the test fails with what it has printed.
    """
    pytest.importorskip("mpi4py")
    launcher: list[str] = []
    if n > 0:
        # The environment's own launcher first: that of another MPI would start n separate single-rank jobs.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        mpirun = shutil.which("mpirun", path=path)
        if mpirun is None:
            pytest.skip("there is no mpirun")
        launcher = [mpirun, "-n", str(n)]
    process = subprocess.Popen(
        [*launcher, sys.executable, str(script), *map(str, args)],
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        # Open MPI gives every rank a process group of its own: killing the launcher's would leave them.
        for running in [*psutil.Process(process.pid).children(recursive=True), process]:
            running.kill()
        stdout, stderr = process.communicate()
        pytest.fail(f"{script} on {n} ranks did not end within {timeout} s\n{stdout}\n{stderr}")
    # colorama, where it is installed, resets colours at the end of a process.
    stdout = re.sub(r"\x1b\[[0-9;]*m", "", stdout)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def run_checks(n: int, folder: Path, *modules: str, timeout: float = 60.0) -> None:
    """Run every check of modules on `n` ranks: one launch for all, starting ranks takes longer than most."""
    package = ".".join(folder.relative_to(REPOSITORY).parts)
    names = [f"{package}.{module}" for module in modules]
    result = run_ranks(__file__, n, *names, timeout=timeout)
    assert result.returncode == 0, printed_by(result)
    sources = "".join((folder / f"{module}.py").read_text("utf-8") for module in modules)
    assert result.stdout.split() == re.findall(r"^def (check_\w+)", sources, re.M)


def printed_by(result: subprocess.CompletedProcess[str]) -> str:
    """All that a job has printed, for the message of a test."""
    return f"{result.args} returned {result.returncode}\n{result.stdout}\n{result.stderr}"


def check_on_this_rank(modules: list[str]) -> None:
    """Run every check of the modules, and print the names of those that passed on all ranks."""
    from nnabla_adaloss import MPICommunicator

    comm = MPICommunicator(timeout_s=60.0)
    comm.init()
    with comm.abort_on_exception():
        for module in modules:
            for name, check in list(vars(importlib.import_module(module)).items()):
                if name.startswith("check_"):
                    check(comm)
                    if comm.rank == 0:
                        print(name, flush=True)
        comm.barrier()


if __name__ == "__main__":
    check_on_this_rank(sys.argv[1:])
