# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's run-time compiler, by itself and with what CuPy would tell it; neither needs a GPU or a driver."""

from __future__ import annotations

import ctypes
import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, List, NamedTuple, Sequence, Tuple
from unittest import mock

import pytest


def nvidia_wheel(package: str) -> Path:
    """Where one of NVIDIA's wheels has its files."""
    spec = importlib.util.find_spec(f"nvidia.{package}")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"needs the wheel nvidia-{package.replace('_', '-')}-cu12")
    return Path(next(iter(spec.submodule_search_locations)))


class Compiled(NamedTuple):
    """What came of a compilation."""

    status: int  # 0 when it succeeded
    log: str
    ptx: str


class Nvrtc:
    """NVRTC from NVIDIA's wheel."""

    def __init__(self) -> None:
        path = nvidia_wheel("cuda_nvrtc") / "lib" / "libnvrtc.so.12"
        self._library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)

    def architectures(self) -> List[int]:
        """The numbers of the architectures that it compiles for: 90 for sm_90."""
        count = ctypes.c_int()
        assert self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count)) == 0
        numbers = (ctypes.c_int * count.value)()
        assert self._library.nvrtcGetSupportedArchs(numbers) == 0
        return list(numbers)

    def compile(self, source: str, options: Sequence[str]) -> Compiled:
        """Compile in a thread of its own: NVRTC 12.0 leaves the C locale behind in the one it runs in."""
        with ThreadPoolExecutor(max_workers=1) as thread:
            return thread.submit(self._compile, source, options).result()

    def _compile(self, source: str, options: Sequence[str]) -> Compiled:
        program = ctypes.c_void_p()
        created = self._library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"adaloss.cu", 0, None, None
        )
        assert created == 0
        arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = self._library.nvrtcCompileProgram(program, len(options), arguments)
        log = self._text("ProgramLog", program)
        ptx = "" if status else self._text("PTX", program)
        self._library.nvrtcDestroyProgram(ctypes.byref(program))
        return Compiled(status, log, ptx)

    def _text(self, what: str, program: ctypes.c_void_p) -> str:
        size = ctypes.c_size_t()
        getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        getattr(self._library, f"nvrtcGet{what}")(program, text)
        return text.value.decode()


def options_of_cupy(options: Tuple[str, ...], architecture: int) -> Tuple[str, ...]:
    """The options that CuPy's `RawModule` gives to NVRTC when it is given `options`.

    CuPy's own code puts them together; where it would compile, they are taken from it.
    """
    Nvrtc()  # CuPy finds the library that is loaded
    pytest.importorskip("cupy", reason="needs CuPy (no GPU): pip install cupy-cuda12x==13.6.0")
    from cupy._core import core
    from cupy.cuda import compiler

    class Found(Exception):
        pass

    class Program:
        def __init__(self, source: str, *_: Any, **__: Any) -> None:
            self._source = source

        def compile(self, options: Tuple[str, ...] = (), _: Any = None) -> Tuple[bytes, Any]:
            if self._source:
                raise Found(options)
            return b"", None  # CuPy compiles nothing, to learn the compiler's version

    # It remembers its result for each device, and asks the driver which one is current.
    architecture_option = compiler._get_arch_for_options_for_nvrtc.__wrapped__
    patches = {"_NVRTCProgram": Program, "_get_arch_for_options_for_nvrtc": architecture_option}
    with mock.patch.multiple(compiler, **patches), pytest.raises(Found) as found:
        core.compile_with_cache("nothing", options, arch=str(architecture), backend="nvrtc")
    (given,) = found.value.args
    return tuple(given)
