# SPDX-License-Identifier: Apache-2.0
"""Which kernels suit a context."""

from __future__ import annotations

import importlib.util
import warnings

import nnabla as nn

from .cpu import CpuKernels
from .cuda import CudaKernels
from .interface import Kernels
from .plain import PlainKernels


def select_kernels(context: nn.Context) -> Kernels:
    """The fastest kernels for the arrays of `context`.

    `CpuKernels` for nnabla's CPU backend, `CudaKernels` for its CUDA extension if CuPy is installed, and
    `PlainKernels` for everything else.

    Warns:
        RuntimeWarning: a CUDA context has to do with `PlainKernels` because CuPy is missing.

    Example:
        >>> type(select_kernels(nn.get_current_context())).__name__
        'CpuKernels'
    """
    backends = {name.partition(":")[0] for name in context.backend}
    if backends == {"cpu"}:
        return CpuKernels()
    if backends & {"cuda", "cudnn"}:
        if importlib.util.find_spec("cupy") is not None:
            return CudaKernels(context)
        warnings.warn(
            "CuPy is not installed, so loss scaling on the GPU will be slow; install nnabla-adaloss with the "
            "extra of your CUDA version, such as nnabla-adaloss[cuda120]",
            RuntimeWarning,
            stacklevel=2,
        )
    return PlainKernels(context)
