# SPDX-License-Identifier: Apache-2.0
"""Passes over array memory: one interface with a backend for each device."""

from .cpu import CpuKernels as CpuKernels
from .cuda import CudaKernels as CudaKernels
from .interface import Kernels as Kernels
from .interface import ScaledCopies as ScaledCopies
from .measurements import Measurements as Measurements
from .measurements import measurements_by as measurements_by
from .select import select_kernels as select_kernels
