# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
from pathlib import Path
from typing import List

import nnabla as nn
import pytest

from nnabla_adaloss.kernels import CpuKernels, CudaKernels, select, select_kernels
from tests.kernels.host_launcher import HostLauncher, pretend_cupy

GPU = ["cudnn:half", "cuda:half", "cpu:half"]


@pytest.mark.parametrize("backend", [["cpu:float"], ["cpu:half"], ["cpu"], ["other:float"]])
@pytest.mark.parametrize("array_class", ["", "CpuArray", "CpuCachedArray", "OtherArray"])
def test_everything_but_a_gpu_gets_the_kernels_of_the_cpu(backend: List[str], array_class: str) -> None:
    assert isinstance(select_kernels(nn.Context(backend, array_class, "0")), CpuKernels)
    assert isinstance(select_kernels(nn.Context()), CpuKernels)


def test_cuda_without_cupy_is_slow_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.warns(RuntimeWarning, match=r"CuPy is not installed.*cuda120"):
        assert isinstance(select_kernels(nn.Context(GPU, "CudaCachedArray", "0")), CpuKernels)


@pytest.mark.parametrize("of_host", ["", "CpuCachedArray", "CpuArray"])
def test_all_contexts_of_a_gpu_share_kernels(
    monkeypatch: pytest.MonkeyPatch, cuda_library: Path, of_host: str
) -> None:
    made: List[int] = []

    def launcher_of(device: int) -> HostLauncher:
        made.append(device)
        return HostLauncher(cuda_library)

    pretend_cupy(monkeypatch, launcher_of)
    select._cuda_kernels.cache_clear()
    try:
        half = select_kernels(nn.Context(GPU, "CudaCachedArray", "0"))
        single = select_kernels(nn.Context(["cudnn:float", "cuda:float"], "CudaCachedArray", "0"))
        on_host = select_kernels(nn.Context(GPU, of_host, "0"))  # of a function without a CUDA implementation
        other = select_kernels(nn.Context(GPU, "CudaCachedArray", "1"))
    finally:
        select._cuda_kernels.cache_clear()
    assert isinstance(half, CudaKernels)
    assert half is single is on_host
    # Each name would be converted for each address.
    assert half.context.backend == []
    assert other is not half
    assert made == [0, 1]
