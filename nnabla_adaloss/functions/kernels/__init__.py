# SPDX-License-Identifier: Apache-2.0
"""Passes over array memory, with one interface and a backend for every device."""

from __future__ import annotations

import nnabla as nn

from nnabla_adaloss.functions.kernels.cpu import CpuKernels
from nnabla_adaloss.functions.kernels.interface import (
    EXPONENT_BINS,
    ExponentHistogram,
    GradientToUnscale,
    Kernels,
    RoundingStatistics,
)

__all__ = [
    "EXPONENT_BINS",
    "CpuKernels",
    "ExponentHistogram",
    "GradientToUnscale",
    "Kernels",
    "RoundingStatistics",
    "select_kernels",
]


def select_kernels(context: nn.Context) -> Kernels:
    """The fastest kernels for arrays of `context`."""
    return CpuKernels()
