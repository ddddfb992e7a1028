# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import nnabla as nn
import pytest

from nnabla_adaloss.kernels import CpuKernels, CudaKernels, Kernels
from nnabla_adaloss.kernels.cpu_library import CpuLibrary
from tests.kernels.host_launcher import HostLauncher, kernels_for_host

CPU = nn.Context(["cpu:float"], "CpuCachedArray", "0")


@pytest.fixture(scope="session")
def cuda_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The CUDA kernels as a shared library for the CPU."""
    return kernels_for_host(tmp_path_factory)


@pytest.fixture
def launcher(cuda_library: Path) -> HostLauncher:
    return HostLauncher(cuda_library)


@pytest.fixture(params=["cpu", "cpu baseline", "cuda on host"], scope="session")
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """The backends, one after another; none holds state between calls."""
    if request.param == "cpu":
        return CpuKernels()
    if request.param == "cpu baseline":  # as on a processor with neither wide registers nor float16
        return CpuKernels(CpuLibrary("baseline"))
    return CudaKernels(CPU, HostLauncher(request.getfixturevalue("cuda_library")))
