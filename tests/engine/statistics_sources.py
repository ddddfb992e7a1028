# SPDX-License-Identifier: Apache-2.0
"""Sources of statistics, and variables to ask them about."""

from __future__ import annotations

from typing import Any

import nnabla as nn
import numpy as np

from nnabla_adaloss.engine.delayed_statistics import DelayedStatistics
from nnabla_adaloss.engine.immediate_statistics import ImmediateStatistics
from nnabla_adaloss.kernels import CpuKernels
from nnabla_adaloss.kernels.measurements import HostMeasurements
from nnabla_adaloss.kernels.scratch import ScratchPool


def immediate(storage: Any = None) -> ImmediateStatistics:
    return ImmediateStatistics(CpuKernels(), ScratchPool(), storage)


def delayed(storage: Any = None) -> DelayedStatistics:
    return DelayedStatistics(HostMeasurements(CpuKernels()), ScratchPool(), storage)


def variable(*values: float) -> nn.Variable:
    v = nn.Variable((len(values),))
    v.d = v.g = np.array(values, np.float32)
    return v
