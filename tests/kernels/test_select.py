# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys

import nnabla as nn
import pytest

from nnabla_adaloss.kernels import CpuKernels, PlainKernels, select_kernels


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


def test_an_unknown_backend_gets_plain_kernels() -> None:
    assert isinstance(select_kernels(nn.Context(["other:float"], "OtherArray", "0")), PlainKernels)
