# SPDX-License-Identifier: Apache-2.0
"""Runs the CUDA kernels on the CPU: their source compiled by g++, launched by the package's own code."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, List, Optional, Sequence, Tuple

import numpy as np
import pytest

from nnabla_adaloss.kernels import cuda
from nnabla_adaloss.kernels.cuda_launcher import Bytes, cuda_source, kernel_names, layout

SHIM = Path(__file__).parent / "host_shim"
THREADS_PER_BLOCK = 64  # two warps: every barrier and shuffle is there
COMPILER = shutil.which("g++")

LAUNCH = """
extern "C" const char* launch_{0}(unsigned grid, unsigned n, unsigned* blocks, void** arguments, bool real) {{
    return run_on_host({0}, grid, n, blocks, arguments, real);
}}
"""
# What a kernel must not do, to see that it is found.
HANGS = """
__global__ void hangs(u32 waiting) {
    if (threadIdx.x < waiting) {
        __syncthreads();
    }
}
"""


def layout_checks(struct: str) -> str:
    """C++ that does not compile unless NumPy's idea of a struct is the compiler's."""
    dtype = layout(struct)
    checks = [f"static_assert(sizeof({struct}) == {dtype.itemsize});"]
    for name, (_, offset, *_) in (dtype.fields or {}).items():
        checks.append(f"static_assert(offsetof({struct}, {name}) == {offset});")
    return "\n".join(checks)


def compiled(factory: pytest.TempPathFactory, name: str, code: str, *options: str) -> Path:
    """A shared library of C++ code, made once in a run of the tests, whose workers share it."""
    if COMPILER is None:
        pytest.skip("g++ is needed to run the CUDA kernels on the CPU")
    run = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        run = run.parent
    source, library = run / f"{name}.cpp", run / f"{name}.so"
    with open(run / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            source.write_text(code, encoding="utf-8")
            always = ["-std=c++20", "-O1", "-Wall", "-Werror", "-fPIC", "-shared"]
            subprocess.run([COMPILER, *always, *options, str(source), "-o", str(library)], check=True)
    return library


def kernels_for_host(factory: pytest.TempPathFactory) -> Path:
    """The library with ``launch_NAME(grid, count, blocks, arguments, real_threads)`` for every kernel."""
    checks = [layout_checks(struct) for struct in ("Task", "Tasks", "Row", "Format")]
    launches = [LAUNCH.format(name) for name in (*kernel_names(), "hangs")]
    code = "\n".join(["#include <cstddef>", cuda_source(), HANGS, *checks, *launches])
    # Strict rounding as on a GPU; its floats may be read as uint4 there.
    options = ["-march=native", "-ffp-contract=off", "-fno-strict-aliasing", "-pthread"]
    # As on a GPU, 16 bytes are read and written where an address is a multiple of 16, or the process ends.
    options += ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]
    # Fibers jump from stack to stack, which a fortified longjmp refuses.
    options += ["-U_FORTIFY_SOURCE", f"-DTHREADS_PER_BLOCK={THREADS_PER_BLOCK}", f"-I{SHIM}"]
    return compiled(factory, "adaloss_on_host", code, *options)


class HostMemory:
    def __init__(self, size: int) -> None:
        self._bytes = np.zeros(size + 16, np.uint8)
        self.ptr = (self._bytes.ctypes.data + 15) // 16 * 16


class HostLauncher:
    """A `Launcher` that runs each kernel to its end before it returns.

    Args:
        library: what `kernels_for_host` made.
        max_blocks: size of the imagined device: with few blocks, arrays need not be large to take several.
        only_blocks: run these alone; default: all.
        real_threads: whether a block's threads are real ones, in place of fibers that take turns.
    """

    def __init__(
        self,
        library: Path,
        max_blocks: int = 3,
        only_blocks: Optional[Sequence[int]] = None,
        real_threads: bool = False,
    ) -> None:
        self._library = ctypes.CDLL(str(library))
        self._only_blocks = only_blocks
        self._real_threads = real_threads
        self.max_blocks = max_blocks
        self.launches: List[str] = []

    card = "a card (compute capability 00)"

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
        function.restype = ctypes.c_char_p
        where = ctypes.c_void_p(chosen.ctypes.data)
        error = function(
            ctypes.c_uint(blocks),
            ctypes.c_uint(chosen.size),
            where,
            pointers,
            ctypes.c_bool(self._real_threads),
        )
        if error is not None:
            raise RuntimeError(f"{kernel}: {error.decode()}")

    def fetch(self, memory: HostMemory, size: int) -> Bytes:
        return np.frombuffer(ctypes.string_at(memory.ptr, size), np.uint8)


def pretend_cupy(monkeypatch: pytest.MonkeyPatch, launcher_of: Callable[[int], Any]) -> None:
    """Let the package take CuPy for installed, and these launchers for its own."""
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    sys.modules["cupy"].__spec__ = ModuleSpec("cupy", None)
    monkeypatch.setattr(cuda, "CupyLauncher", launcher_of)
