# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import nnabla as nn
import pytest

from nnabla_adaloss.kernels import CpuKernels, CudaKernels, Kernels
from nnabla_adaloss.kernels.cpu_library import levels
from tests.kernels.host_launcher import HostLauncher, kernels_for_host

CPU = nn.Context(["cpu:float"], "CpuCachedArray", "0")


@pytest.fixture(scope="session")
def cuda_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The CUDA kernels as a shared library for the CPU."""
    return kernels_for_host(tmp_path_factory)


@pytest.fixture
def launcher(cuda_library: Path) -> HostLauncher:
    return HostLauncher(cuda_library)


# "baseline" is as on a processor with neither wide registers nor float16.
@pytest.fixture(params=[levels()[0], "baseline", "cuda on host"], scope="session")
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """The backends, one after another; none holds state between calls."""
    if request.param == "cuda on host":
        return CudaKernels(CPU, HostLauncher(request.getfixturevalue("cuda_library")))
    return CpuKernels(request.param)
