# SPDX-License-Identifier: Apache-2.0
"""Selection of the kernels that suit a context."""

from __future__ import annotations

import importlib.util
from functools import cache

import nnabla as nn

from ..errors import warn
from ..host_context import is_on_host
from .cpu import CpuKernels
from .cuda import CudaKernels
from .interface import Kernels

# nnabla takes all array classes of its CUDA extension for the same memory: each finds what another has made.
DEVICE_ARRAY_CLASS = "CudaCachedArray"


@cache
def _cpu_kernels() -> CpuKernels:
    # What the processor can do and how many threads the container allows is found out once: files are read.
    return CpuKernels()


@cache
def _cuda_kernels(array_class: str, device_id: str) -> CudaKernels:
    # Compiled code and 5 MB of workspace are the device's: one of each per process, whoever asks for it.
    # Without backends, as `HOST` is: nnabla would convert their names for each address.
    return CudaKernels(nn.Context([], array_class, device_id))


def select_kernels(context: nn.Context) -> Kernels:
    """The fastest kernels for the arrays of `context`.

    `CudaKernels` for nnabla's CUDA extension if CuPy is installed, else `CpuKernels`: nnabla copies arrays
    that are elsewhere to the host and back. All contexts of a GPU get the same `CudaKernels`, and so does
    that of a function that runs on the host because it has no implementation for a GPU.

    Warns:
        RuntimeWarning: a CUDA context has to do with `CpuKernels` because CuPy is missing.

    Example:
        >>> import nnabla as nn
        >>> from nnabla_adaloss.kernels.select import select_kernels
        >>> type(select_kernels(nn.get_current_context())).__name__
        'CpuKernels'
    """
    backends = {name.partition(":")[0] for name in context.backend}
    if backends & {"cuda", "cudnn"}:
        if importlib.util.find_spec("cupy") is not None:
            array_class = DEVICE_ARRAY_CLASS if is_on_host(context) else context.array_class
            return _cuda_kernels(array_class, context.device_id)
        warn(
            "CuPy is not installed, so loss scaling on the GPU will be slow; install nnabla-adaloss with the "
            "extra of your CUDA version, such as nnabla-adaloss[cuda120]",
            RuntimeWarning,
        )
    return _cpu_kernels()
