# SPDX-License-Identifier: Apache-2.0
"""Runs the CUDA kernels on the CPU: their source compiled by g++, launched by the package's own code."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any, List, Tuple

import numpy as np

from nnabla_adaloss.functions.kernels.cuda_launcher import Bytes
from nnabla_adaloss.functions.kernels.cuda_source import CudaSource

SHIM = Path(__file__).parent / "host_shim"
THREADS_PER_BLOCK = 64  # two warps: every barrier and shuffle is there, and threads are expensive here
COMPILER = shutil.which("g++")


def compile_for_host(directory: Path) -> Path:
    """The shared library with ``launch_NAME(blocks, arguments)`` for every kernel."""
    source = CudaSource()
    launch = (
        'extern "C" void launch_{0}(unsigned blocks, void** values) {{ run_on_host({0}, blocks, values); }}'
    )
    launches = [launch.format(name) for name in source.kernels]
    code, library = directory / "adaloss_on_host.cpp", directory / "adaloss_on_host.so"
    code.write_text("\n".join([source.text, *launches]), encoding="utf-8")
    command: List[Any] = [
        COMPILER,
        "-std=c++20",
        "-O2",
        "-ffp-contract=off",
        "-fno-strict-aliasing",
        "-pthread",
    ]
    command += [
        "-Wall",
        "-Werror",
        "-fPIC",
        "-shared",
        f"-DTHREADS_PER_BLOCK={THREADS_PER_BLOCK}",
        f"-I{SHIM}",
    ]
    subprocess.run([*command, code, "-o", library], check=True)
    return library


class HostMemory:
    def __init__(self, size: int) -> None:
        self._bytes = np.zeros(size + 16, np.uint8)
        self.ptr = (self._bytes.ctypes.data + 15) // 16 * 16


class HostLauncher:
    """A `Launcher` that runs each kernel to its end before it returns."""

    def __init__(self, library: Path, max_blocks: int = 3) -> None:
        self._library = ctypes.CDLL(str(library))
        self.max_blocks = max_blocks
        self.launches: List[str] = []

    def allocate(self, size: int) -> HostMemory:
        return HostMemory(size)

    def clear(self, memory: HostMemory, size: int) -> None:
        ctypes.memset(memory.ptr, 0, size)

    def launch(self, kernel: str, blocks: int, arguments: Tuple[Any, ...]) -> None:
        self.launches.append(kernel)
        values = [np.atleast_1d(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
        self._library[f"launch_{kernel}"](ctypes.c_uint(blocks), pointers)

    def fetch(self, memory: HostMemory, size: int) -> Bytes:
        return np.frombuffer(ctypes.string_at(memory.ptr, size), np.uint8)
