# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import nnabla as nn
import pytest

from nnabla_adaloss.functions.kernels import CpuKernels, Kernels, PlainKernels

CPU = nn.Context(["cpu:float"], "CpuCachedArray", "0")
BACKENDS = {"cpu": CpuKernels, "plain": lambda: PlainKernels(CPU)}


@pytest.fixture(params=list(BACKENDS), scope="session")
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return BACKENDS[request.param]()
