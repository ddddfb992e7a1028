# SPDX-License-Identifier: Apache-2.0
"""Passes over array memory, with one interface and a backend for every device."""

from __future__ import annotations

import nnabla as nn

from .cpu import CpuKernels
from .interface import (
    EXPONENT_BINS,
    ExponentHistogram,
    GradientToUnscale,
    Kernels,
    RoundingStatistics,
)
from .plain import PlainKernels

__all__ = [
    "EXPONENT_BINS",
    "CpuKernels",
    "ExponentHistogram",
    "GradientToUnscale",
    "Kernels",
    "PlainKernels",
    "RoundingStatistics",
    "select_kernels",
]


def select_kernels(context: nn.Context) -> Kernels:
    """The fastest kernels for the arrays of `context`: compiled ones on a CPU, plain ones elsewhere."""
    if all(name.partition(":")[0] == "cpu" for name in context.backend):
        return CpuKernels()
    return PlainKernels(context)
