# SPDX-License-Identifier: Apache-2.0
"""The CUDA source compiles with NVRTC, as CuPy will compile it, for every architecture in use."""

from __future__ import annotations

import ctypes
import importlib.util
import locale
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nnabla_adaloss.kernels.cuda_source import CudaSource


def nvidia_wheel(package: str) -> Path:
    spec = importlib.util.find_spec(f"nvidia.{package}")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"needs the wheel nvidia-{package.replace('_', '-')}-cu12")
    return Path(next(iter(spec.submodule_search_locations)))


@pytest.fixture(scope="module")
def nvrtc() -> ctypes.CDLL:
    return ctypes.CDLL(str(nvidia_wheel("cuda_nvrtc") / "lib" / "libnvrtc.so.12"))


def compile_log(nvrtc: ctypes.CDLL, source: str, options: list[str]) -> tuple[int, str]:
    program = ctypes.c_void_p()
    text = source.encode()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, b"adaloss.cu", 0, None, None) == 0
    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    status = nvrtc.nvrtcCompileProgram(program, len(options), arguments)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return status, log.value.decode()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_70", "sm_80", "sm_90"])
def test_compiles_without_a_warning(nvrtc: ctypes.CDLL, architecture: str) -> None:
    include = nvidia_wheel("cuda_runtime") / "include"
    options = [f"--gpu-architecture={architecture}", "--std=c++14", f"-I{include}"]
    with ThreadPoolExecutor(max_workers=1) as thread:
        compiled = thread.submit(compile_log, nvrtc, CudaSource().text, options)
    assert compiled.result() == (0, "")


@pytest.mark.skipif(not hasattr(locale, "nl_langinfo"), reason="needs POSIX locales")
def test_compiling_in_a_thread_of_its_own_keeps_our_locale(nvrtc: ctypes.CDLL) -> None:
    before = locale.nl_langinfo(locale.CODESET)
    with ThreadPoolExecutor(max_workers=1) as thread:
        assert thread.submit(compile_log, nvrtc, "__global__ void nothing() {}", []).result() == (0, "")
    assert locale.nl_langinfo(locale.CODESET) == before


def test_all_kernels_are_found() -> None:
    source = CudaSource()
    assert source.text.count("__global__") == len(source.kernels) == len(set(source.kernels))


def test_tasks_fit_in_the_arguments_of_a_launch() -> None:
    source = CudaSource()
    pointers = 8 * 8
    assert source.layout("Tasks").itemsize + source.layout("Format").itemsize + pointers <= 4096


@pytest.mark.parametrize("missing", ["NO_SUCH_CONSTANT", "THREADS"])
def test_a_constant_without_a_number_is_a_key_error(missing: str) -> None:
    with pytest.raises(KeyError, match=missing):
        CudaSource().constant(missing)


def test_an_unknown_struct_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="NoSuchStruct"):
        CudaSource().layout("NoSuchStruct")
