# SPDX-License-Identifier: Apache-2.0
"""Runs the CUDA kernels on the CPU: their source compiled by g++, launched by the package's own code."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any, List, Optional, Sequence, Tuple

import numpy as np

from nnabla_adaloss.kernels.cuda_launcher import Bytes
from nnabla_adaloss.kernels.cuda_source import CudaSource

SHIM = Path(__file__).parent / "host_shim"
THREADS_PER_BLOCK = 64  # two warps: every barrier and shuffle is there, and threads are expensive here
COMPILER = shutil.which("g++")


LAUNCH = """
extern "C" void launch_{0}(unsigned grid, unsigned count, unsigned* blocks, void** arguments) {{
    run_on_host({0}, grid, count, blocks, arguments);
}}
"""


def layout_checks(source: CudaSource, struct: str) -> str:
    """C++ that does not compile unless NumPy's idea of a struct is the compiler's."""
    layout = source.layout(struct)
    checks = [f"static_assert(sizeof({struct}) == {layout.itemsize});"]
    for name, (_, offset, *_) in (layout.fields or {}).items():
        checks.append(f"static_assert(offsetof({struct}, {name}) == {offset});")
    return "\n".join(checks)


def compile_for_host(directory: Path) -> Path:
    """The shared library with ``launch_NAME(grid, count, blocks, arguments)`` for every kernel, made once."""
    source = CudaSource()
    checks = [layout_checks(source, struct) for struct in ("Task", "Tasks", "Row", "Format")]
    launches = [LAUNCH.format(name) for name in source.kernels]
    code, library = directory / "adaloss_on_host.cpp", directory / "adaloss_on_host.so"
    if library.exists():
        return library
    code.write_text("\n".join(["#include <cstddef>", source.text, *checks, *launches]), encoding="utf-8")
    # Strict rounding as on a GPU; its floats may be read as uint4 there.
    options = ["-std=c++20", "-O1", "-march=native", "-ffp-contract=off", "-fno-strict-aliasing", "-pthread"]
    options += [
        "-Wall",
        "-Werror",
        "-fPIC",
        "-shared",
        f"-DTHREADS_PER_BLOCK={THREADS_PER_BLOCK}",
        f"-I{SHIM}",
    ]
    subprocess.run([str(COMPILER), *options, str(code), "-o", str(library)], check=True)
    return library


class HostMemory:
    def __init__(self, size: int) -> None:
        self._bytes = np.zeros(size + 16, np.uint8)
        self.ptr = (self._bytes.ctypes.data + 15) // 16 * 16


class HostLauncher:
    """A `Launcher` that runs each kernel to its end before it returns.

    Args:
        library: what `compile_for_host` made.
        max_blocks: size of the imagined device: with few blocks, arrays need not be large to take several.
        only_blocks: run these alone; default: all.
    """

    def __init__(
        self, library: Path, max_blocks: int = 3, only_blocks: Optional[Sequence[int]] = None
    ) -> None:
        self._library = ctypes.CDLL(str(library))
        self._only_blocks = only_blocks
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
        chosen = np.array(range(blocks) if self._only_blocks is None else self._only_blocks, np.uint32)
        function = self._library[f"launch_{kernel}"]
        function(
            ctypes.c_uint(blocks), ctypes.c_uint(chosen.size), ctypes.c_void_p(chosen.ctypes.data), pointers
        )

    def fetch(self, memory: HostMemory, size: int) -> Bytes:
        return np.frombuffer(ctypes.string_at(memory.ptr, size), np.uint8)
