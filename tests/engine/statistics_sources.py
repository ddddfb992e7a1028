# SPDX-License-Identifier: Apache-2.0
"""Sources of statistics, of a graph whose arrays hold what a test wants."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence

import nnabla as nn
import nnabla.functions as F
import numpy as np

from nnabla_adaloss.engine.delayed_statistics import DelayedStatistics
from nnabla_adaloss.engine.immediate_statistics import ImmediateStatistics
from nnabla_adaloss.graph.plan import GraphPlan
from nnabla_adaloss.kernels import CpuKernels, Kernels
from nnabla_adaloss.kernels.measurements import HostMeasurements, Measurements
from nnabla_adaloss.kernels.scratch import ScratchPool


class Arrays:
    """A graph with one variable for each list of values, which its data and its gradient hold.

    Args:
        values: what they hold.
        leaves: whether they are leaves, as weights are; else activations.

    Attributes:
        variables: the variables.
        positions: the position of each in the graph.
    """

    def __init__(self, *values: Sequence[float], leaves: bool = True) -> None:
        self._leaves = [nn.Variable((len(many),), need_grad=True) for many in values]
        self.variables = self._leaves if leaves else [F.identity(v) for v in self._leaves]
        loss = F.sum(F.concatenate(*self.variables, axis=0) if len(values) > 1 else self.variables[0])
        self.plan = GraphPlan(loss, names={})
        self.positions: List[int] = [self.plan.positions[hash(v)] for v in self.variables]
        for v, many in zip(self.variables, values):
            v.d = v.g = np.array(many, np.float32)

    def immediate(self, storage: Any = None, kernels: Optional[Kernels] = None) -> ImmediateStatistics:
        return ImmediateStatistics(self.plan, kernels or CpuKernels(), ScratchPool(), storage)

    def delayed(self, storage: Any = None, measurements: Optional[Measurements] = None) -> DelayedStatistics:
        measurements = measurements or HostMeasurements(CpuKernels())
        return DelayedStatistics(self.plan, measurements, ScratchPool(), storage)
