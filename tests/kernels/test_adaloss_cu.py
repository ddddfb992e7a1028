# SPDX-License-Identifier: Apache-2.0
"""The CUDA source compiles with NVRTC, as CuPy will compile it, for every architecture in use."""

from __future__ import annotations

import re

import pytest

from nnabla_adaloss.kernels.cuda_launcher import OPTIONS, cuda_source, kernel_names, layout
from tests.kernels.nvrtc import Nvrtc, nvidia_wheel, options_of_cupy

ARCHITECTURES = [70, 80, 90, 100]


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    return Nvrtc()


def known(nvrtc: Nvrtc, architecture: int) -> int:
    if architecture not in nvrtc.architectures():
        pytest.skip(f"this NVRTC does not know sm_{architecture}")
    return architecture


def without_cupy(architecture: int) -> tuple[str, ...]:
    """The options of CuPy that matter most, and another version of the headers."""
    include = nvidia_wheel("cuda_runtime") / "include"
    return (*OPTIONS, f"-I{include}", "-ftz=true", f"-arch=sm_{architecture}")


def as_cupy(architecture: int) -> tuple[str, ...]:
    return options_of_cupy(OPTIONS, architecture)


@pytest.mark.slow
@pytest.mark.parametrize("options", [as_cupy, without_cupy])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles_without_a_warning_and_flushes_no_float(nvrtc: Nvrtc, architecture: int, options) -> None:
    given = options(known(nvrtc, architecture))
    assert "-ftz=true" in given
    status, log, ptx = nvrtc.compile(cuda_source(), given)
    assert (status, log) == (0, "")
    assert ptx.count(".entry") == len(kernel_names())
    # No exception is needed: not one operation on floats is left to the compiler's choice.
    assert re.findall(r"^.*\.ftz\b.*$", ptx, re.MULTILINE) == []


@pytest.mark.slow
def test_a_thread_writes_16_bytes_next_to_those_of_the_thread_before(nvrtc: Nvrtc) -> None:
    # Two stores of 16 bytes side by side in one thread leave gaps between threads, each time.
    ptx = nvrtc.compile(cuda_source(), without_cupy(known(nvrtc, 90))).ptx
    assert "st.global.v4.f32" in ptx
    assert re.findall(r"st\.global\.v4\.f32\s+\[%rd\d+\+16\]", ptx) == []


def test_the_compiler_flushes_subnormals_only_where_allowed(nvrtc: Nvrtc) -> None:
    source = 'extern "C" __global__ void f(float* x) { *x = __fmul_rn(*x, 0.5f); }'
    assert "mul.rn.ftz.f32" in nvrtc.compile(source, ["-ftz=true", "-arch=sm_90"]).ptx


def test_all_kernels_are_found() -> None:
    names = kernel_names()
    assert cuda_source().count("__global__") == len(names) == len(set(names))


def test_tasks_fit_in_the_arguments_of_a_launch() -> None:
    pointers = 8 * 8
    assert layout("Tasks").itemsize + layout("Format").itemsize + pointers <= 4096
