# SPDX-License-Identifier: Apache-2.0
"""Compilation of `adaloss.cu` and access to a device by CuPy: memory, launches, copies to the host."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import resources
from typing import Any, Dict, List, Tuple

import numpy as np
from numpy.typing import NDArray

from ..errors import missing_code

Bytes = NDArray[np.uint8]

OPTIONS = ("--std=c++14",)
"""Options that the kernels are compiled with. CuPy adds its own, -ftz=true among them."""

_SCALARS: Dict[str, Any] = {"u32": np.uint32, "u64": np.uint64, "float": np.float32, "double": np.float64}


@cache
def cuda_source() -> str:
    """Text of `adaloss.cu`, from which host code reads structs and constants."""
    return resources.files(__package__).joinpath("adaloss.cu").read_text(encoding="utf-8")


def kernel_names() -> List[str]:
    """Names of the kernels."""
    return re.findall(r"__global__ __launch_bounds__\(.*?\) void (\w+)\(", cuda_source())


@cache
def constant(name: str) -> int:
    """Value of `constexpr u32 NAME = value;` or `#define NAME value`."""
    (value,) = re.findall(rf"^(?:constexpr u32 {name} = |#define {name} )(\d+)\b", cuda_source(), re.M)
    return int(value)


@cache
def layout(name: str) -> np.dtype[Any]:
    """Dtype of `struct NAME`, padded as in C++."""
    (body,) = re.findall(rf"^struct {name} {{\n(.*?)^}};", cuda_source(), re.M | re.S)
    fields: List[Any] = []
    for kind, field, length in re.findall(r"^ *(\w+) (\w+)(?:\[(\w+)\])?;", body, re.M):
        dtype = _SCALARS[kind] if kind in _SCALARS else layout(kind)
        fields.append((field, dtype, (constant(length),)) if length else (field, dtype))
    return np.dtype(fields, align=True)


class CupyLauncher:
    """Device that runs kernels in order; ImportError without CuPy, RuntimeError without code for the GPU."""

    # NVRTC compiles at construction. Kernels run in CUDA's legacy default stream, like nnabla's functions,
    # for any current stream of CuPy: each starts after earlier functions.

    def __init__(self, device_id: int) -> None:
        import cupy

        self._cuda = cupy.cuda
        self._device = cupy.cuda.Device(device_id)
        self._stream = cupy.cuda.Stream.null
        threads = constant("THREADS_PER_BLOCK")
        self._block = (threads,)
        resident = min(constant("RESIDENT_THREADS"), self._device.attributes["MaxThreadsPerMultiProcessor"])
        # Number that the device runs at once; more in one task would only wait.
        self.max_blocks = self._device.attributes["MultiProcessorCount"] * (resident // threads)

        def kernels() -> Dict[str, Any]:
            with self._device:
                module = cupy.RawModule(code=cuda_source(), options=OPTIONS)
                return {name: module.get_function(name) for name in kernel_names()}

        # NVRTC 12.0 sets the C locale in the compiling thread, which would then open files as ASCII.
        with ThreadPoolExecutor(max_workers=1) as thread:
            try:
                self._kernels = thread.submit(kernels).result()
            except Exception as error:
                said = missing_code(error, self.card)
                if said is None:
                    raise
                raise RuntimeError(said) from error

    @property
    def card(self) -> str:
        """Name of the device and its compute capability, for messages."""
        name = self._cuda.runtime.getDeviceProperties(self._device.id)["name"].decode()
        return f"{name} (compute capability {self._device.compute_capability})"

    def allocate(self, size: int) -> Any:
        """Allocate zeroed device memory, of `size` bytes from its `ptr` on; freed with the object."""
        with self._device:
            memory = self._cuda.alloc(size)
        self.clear(memory, size)
        return memory

    def clear(self, memory: Any, size: int) -> None:
        """Zero the first `size` bytes, without waiting."""
        with self._device:
            self._cuda.runtime.memsetAsync(memory.ptr, 0, size, self._stream.ptr)

    def launch(self, kernel: str, blocks: int, arguments: Tuple[Any, ...]) -> None:
        """Start a kernel, without waiting for it. Arguments: NumPy scalars, and arrays of size 1 by value."""
        with self._device:
            self._kernels[kernel]((blocks,), self._block, arguments, stream=self._stream)

    def fetch(self, memory: Any, size: int) -> Bytes:
        """Copy the first `size` bytes to the host after all earlier launches have finished."""
        host = np.empty(size, np.uint8)
        runtime = self._cuda.runtime
        with self._device:
            runtime.memcpy(host.ctypes.data, memory.ptr, size, runtime.memcpyDeviceToHost)
        return host
