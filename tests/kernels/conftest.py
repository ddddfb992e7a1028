# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import fcntl
import os
from pathlib import Path

import nnabla as nn
import pytest

from nnabla_adaloss.kernels import CpuKernels, CudaKernels, Kernels, PlainKernels
from nnabla_adaloss.kernels.cpu_library import CpuLibrary
from tests.kernels.host_launcher import COMPILER, HostLauncher, compile_for_host

CPU = nn.Context(["cpu:float"], "CpuCachedArray", "0")


@pytest.fixture(scope="session")
def cuda_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The CUDA kernels as a shared library for the CPU."""
    if COMPILER is None:
        pytest.skip("g++ is needed to run the CUDA kernels on the CPU")
    run = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        run = run.parent  # which the workers share
    directory = run / "cuda_on_host"
    directory.mkdir(exist_ok=True)
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return compile_for_host(directory)


@pytest.fixture
def launcher(cuda_library: Path) -> HostLauncher:
    return HostLauncher(cuda_library)


@pytest.fixture(params=["cpu", "cpu baseline", "plain", "cuda on host"], scope="session")
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """The backends, one after another; none holds state between calls."""
    if request.param == "cpu":
        return CpuKernels()
    if request.param == "cpu baseline":  # as on a processor with neither wide registers nor float16
        return CpuKernels(CpuLibrary("baseline"))
    if request.param == "plain":
        return PlainKernels(CPU)
    return CudaKernels(CPU, HostLauncher(request.getfixturevalue("cuda_library")))
