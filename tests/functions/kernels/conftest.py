# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from nnabla_adaloss.functions.kernels import CpuKernels, Kernels

BACKENDS = {"cpu": CpuKernels}


@pytest.fixture(params=list(BACKENDS), scope="session")
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return BACKENDS[request.param]()
