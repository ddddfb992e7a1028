# SPDX-License-Identifier: Apache-2.0
"""Passes over array memory, with one interface and a backend for every device."""

from __future__ import annotations

from .cpu import CpuKernels
from .cuda import CudaKernels
from .device_tasks import DeviceTable
from .interface import (
    EXPONENT_BINS,
    ExponentHistogram,
    GradientsInPlace,
    GradientToUnscale,
    Kernels,
    PackedArrays,
    RoundingStatistics,
    ScaledCopies,
)
from .measurements import Measurements, measurements_by
from .nnabla_ada_loss import NNablaAdaLoss
from .select import select_kernels

__all__ = [
    "EXPONENT_BINS",
    "CpuKernels",
    "CudaKernels",
    "DeviceTable",
    "ExponentHistogram",
    "GradientToUnscale",
    "GradientsInPlace",
    "Kernels",
    "Measurements",
    "NNablaAdaLoss",
    "PackedArrays",
    "RoundingStatistics",
    "ScaledCopies",
    "measurements_by",
    "select_kernels",
]
