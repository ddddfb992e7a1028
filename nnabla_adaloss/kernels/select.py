# SPDX-License-Identifier: Apache-2.0
"""Selection of the kernels that suit a context."""

from __future__ import annotations

import importlib.util
from functools import cache

import nnabla as nn

from ..errors import warn
from ..host_context import has_gpu, is_on_host
from .cpu import CpuKernels
from .cuda import CudaKernels
from .interface import Kernels

# All array classes of nnabla's CUDA extension share memory: each finds arrays of the others.
DEVICE_ARRAY_CLASS = "CudaCachedArray"


# Once per process: finding the processor's level and the allowed threads reads files.
_cpu_kernels = cache(CpuKernels)


@cache
def _cuda_kernels(array_class: str, device_id: str) -> CudaKernels:
    # One per device and process, as it has compiled code and 5 MB of workspace. Without backends, like
    # `HOST`: nnabla would convert their names for each address.
    return CudaKernels(nn.Context([], array_class, device_id))


def select_kernels(context: nn.Context) -> Kernels:
    """Choose the fastest kernels for the arrays of `context`; RuntimeWarning if a GPU lacks CuPy."""
    # All contexts of a GPU share kernels, also those of functions that run on the host.
    if has_gpu(context.backend):
        if importlib.util.find_spec("cupy") is not None:
            array_class = DEVICE_ARRAY_CLASS if is_on_host(context) else context.array_class
            return _cuda_kernels(array_class, context.device_id)
        warn(
            "CuPy is not installed, so loss scaling on the GPU will be slow; install nnabla-adaloss with the "
            "extra of your CUDA version, such as nnabla-adaloss[cuda120]",
            RuntimeWarning,
        )
    return _cpu_kernels()
