# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import List

import nnabla as nn
import pytest

from nnabla_adaloss.kernels import CpuKernels, CudaKernels, PlainKernels, select, select_kernels
from tests.kernels.host_launcher import HostLauncher


@pytest.mark.parametrize("backend", [["cpu:float"], ["cpu:half"], ["cpu"]])
@pytest.mark.parametrize("array_class", ["", "CpuArray", "CpuCachedArray"])
def test_cpu_contexts(backend: list, array_class: str) -> None:
    assert isinstance(select_kernels(nn.Context(backend, array_class, "0")), CpuKernels)


def test_the_default_context() -> None:
    assert isinstance(select_kernels(nn.Context()), CpuKernels)


def test_cuda_without_cupy_is_slow_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    context = nn.Context(["cudnn:half", "cuda:half", "cpu:half"], "CudaCachedArray", "0")
    with pytest.warns(RuntimeWarning, match=r"CuPy is not installed.*cuda120"):
        assert isinstance(select_kernels(context), PlainKernels)


def test_all_contexts_of_a_gpu_share_kernels(monkeypatch: pytest.MonkeyPatch, cuda_library: Path) -> None:
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    sys.modules["cupy"].__spec__ = ModuleSpec("cupy", None)
    made: List[int] = []

    def launcher_of(device: int) -> HostLauncher:
        made.append(device)
        return HostLauncher(cuda_library)

    monkeypatch.setattr("nnabla_adaloss.kernels.cuda.CupyLauncher", launcher_of)
    select._cuda_kernels.cache_clear()
    try:
        half = select_kernels(nn.Context(["cudnn:half", "cuda:half"], "CudaCachedArray", "0"))
        single = select_kernels(nn.Context(["cudnn:float", "cuda:float"], "CudaCachedArray", "0"))
        other = select_kernels(nn.Context(["cudnn:half", "cuda:half"], "CudaCachedArray", "1"))
    finally:
        select._cuda_kernels.cache_clear()
    assert isinstance(half, CudaKernels)
    assert half is single
    assert other is not half
    assert made == [0, 1]


@pytest.mark.parametrize("array_class", ["", "CpuCachedArray", "CpuArray"])
def test_a_function_of_a_gpu_net_that_runs_on_the_host_gets_the_kernels_of_the_gpu(
    array_class: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: List[str] = []
    monkeypatch.setattr(select.importlib.util, "find_spec", lambda name: ModuleSpec(name, None))
    monkeypatch.setattr(select, "_cuda_kernels", lambda array_class, device: asked.append(array_class))
    select_kernels(nn.Context(["cudnn:half", "cuda:half", "cpu:float"], array_class, "0"))
    monkeypatch.setattr(select.importlib.util, "find_spec", lambda name: None)
    with pytest.warns(RuntimeWarning, match="CuPy is not installed"):
        plain = select_kernels(nn.Context(["cuda:half", "cpu:float"], array_class, "0"))
    assert asked == [plain.context.array_class] == ["CudaCachedArray"]


def test_an_unknown_backend_gets_plain_kernels() -> None:
    assert isinstance(select_kernels(nn.Context(["other:float"], "OtherArray", "0")), PlainKernels)
