# SPDX-License-Identifier: Apache-2.0
"""`adaloss.cu`, and a device that runs it: memory, launches and copies to the host, by CuPy."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import resources
from typing import Any, Dict, List, Tuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

OPTIONS = ("--std=c++14",)
"""Options that the kernels are compiled with. CuPy adds its own, -ftz=true among them."""

_SCALARS: Dict[str, Any] = {"u32": np.uint32, "u64": np.uint64, "float": np.float32, "double": np.float64}


@cache
def cuda_source() -> str:
    """The text of `adaloss.cu`, which host code agrees with by reading it."""
    return resources.files(__package__).joinpath("adaloss.cu").read_text(encoding="utf-8")


def kernel_names() -> List[str]:
    """The names of the kernels."""
    return re.findall(r"__global__ __launch_bounds__\(.*?\) void (\w+)\(", cuda_source())


def constant(name: str) -> int:
    """The value of `constexpr u32 NAME = value;` or `#define NAME value`."""
    (value,) = re.findall(rf"^(?:constexpr u32 {name} = |#define {name} )(\d+)\b", cuda_source(), re.M)
    return int(value)


@cache
def layout(name: str) -> np.dtype[Any]:
    """The dtype of `struct NAME`, padded as C++ pads it."""
    (body,) = re.findall(rf"^struct {name} {{\n(.*?)^}};", cuda_source(), re.M | re.S)
    fields: List[Any] = []
    for kind, field, length in re.findall(r"^ *(\w+) (\w+)(?:\[(\w+)\])?;", body, re.M):
        dtype = _SCALARS[kind] if kind in _SCALARS else layout(kind)
        fields.append((field, dtype, (constant(length),)) if length else (field, dtype))
    return np.dtype(fields, align=True)


class CupyLauncher:
    """A device, as far as kernels are concerned: everything happens in the order it was asked for.

    NVRTC compiles the kernels when it is made. They run in CUDA's legacy default stream, as nnabla does,
    whatever CuPy's current stream is: each starts after the nnabla functions before it.

    Raises:
        ImportError: CuPy is not installed.
        cupy.cuda.compiler.CompileException: the kernels do not compile for the GPU.
    """

    def __init__(self, device_id: int) -> None:
        import cupy

        self._cuda = cupy.cuda
        self._device = cupy.cuda.Device(device_id)
        self._stream = cupy.cuda.Stream.null
        threads = constant("THREADS_PER_BLOCK")
        self._block = (threads,)
        resident = min(constant("RESIDENT_THREADS"), self._device.attributes["MaxThreadsPerMultiProcessor"])
        # How many the device holds at once; more in one task would only wait.
        self.max_blocks = self._device.attributes["MultiProcessorCount"] * (resident // threads)

        def kernels() -> Dict[str, Any]:
            with self._device:
                module = cupy.RawModule(code=cuda_source(), options=OPTIONS)
                return {name: module.get_function(name) for name in kernel_names()}

        # NVRTC (12.0 at least) leaves the C locale behind in the thread that compiles: this one would open
        # files as ASCII from then on.
        with ThreadPoolExecutor(max_workers=1) as thread:
            self._kernels = thread.submit(kernels).result()

    def allocate(self, size: int) -> Any:
        """So many bytes of device memory, all zero, from its `ptr` on; given back when the object goes."""
        with self._device:
            memory = self._cuda.alloc(size)
        self.clear(memory, size)
        return memory

    def clear(self, memory: Any, size: int) -> None:
        """Make the first `size` bytes zero, without waiting for it."""
        with self._device:
            self._cuda.runtime.memsetAsync(memory.ptr, 0, size, self._stream.ptr)

    def launch(self, kernel: str, blocks: int, arguments: Tuple[Any, ...]) -> None:
        """Start a kernel, without waiting for it. Arguments: NumPy scalars, and arrays of size 1 by value."""
        with self._device:
            self._kernels[kernel]((blocks,), self._block, arguments, stream=self._stream)

    def fetch(self, memory: Any, size: int) -> Bytes:
        """Copy the first `size` bytes to the host once all that was launched before has ended."""
        host = np.empty(size, np.uint8)
        runtime = self._cuda.runtime
        with self._device:
            runtime.memcpy(host.ctypes.data, memory.ptr, size, runtime.memcpyDeviceToHost)
        return host
