# SPDX-License-Identifier: Apache-2.0
"""Statistics of the arrays of this iteration."""

from __future__ import annotations

from typing import List, Sequence

import nnabla as nn
import numpy as np

from nnabla_adaloss.core.statistics import ArrayStatistics, statistics_of
from nnabla_adaloss.engine.immediate_statistics import ImmediateStatistics
from nnabla_adaloss.kernels import CpuKernels
from nnabla_adaloss.kernels.scratch import ScratchPool
from tests.engine.statistics_sources import immediate, variable


def test_immediate_statistics_are_of_what_is_there_now() -> None:
    source, v = immediate(), variable(1.0, -4.0, 0.0)
    assert source.gradient(v, 1, 8.0) == statistics_of(v.g)
    v.g = 2.0
    assert source.gradient(v, 1, 8.0).abs_max == 2.0
    assert source.data(v, 1) == statistics_of(v.d)
    assert source.finish() == (set(), {1: 0.25}, [], None)
    assert source.finish() == (set(), {}, [], None)
    assert source.table([1]) is None
    assert source.state([1]) == []


def test_weights_that_were_asked_for_are_measured_in_one_call() -> None:
    calls: List[int] = []

    class Counting(CpuKernels):
        def statistics(self, x: nn.NdArray) -> ArrayStatistics:
            calls.append(1)
            return super().statistics(x)

        def statistics_all(self, arrays: Sequence[nn.NdArray]) -> List[ArrayStatistics]:
            calls.append(len(arrays))
            return super().statistics_all(arrays)

    source = ImmediateStatistics(Counting(), ScratchPool(), None)
    weights = {1: variable(1.0, 2.0), 2: variable(3.0)}
    for values in (1.0, 5.0), (7.0, 2.0):
        source.begin(0, anew=False)
        for v, value in zip(weights.values(), values):
            v.d = value  # too late for the second pass, which looked when it began
        found = [source.data(v, key).abs_max for key, v in weights.items()]
        source.finish()
    assert found == [1.0, 5.0]
    assert calls == [0, 1, 1, 2]
    assert source.data(weights[1], 1).abs_max == 7.0


def test_other_dtypes_are_read_and_left() -> None:
    source, v = immediate(), variable(0.0, 0.0)
    v.d = np.array([3, -4], np.int32)
    assert source.data(v, 1).abs_max == 4.0
    assert v.data.dtype == np.int32
