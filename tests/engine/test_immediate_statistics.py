# SPDX-License-Identifier: Apache-2.0
"""Statistics of the arrays of this iteration."""

from __future__ import annotations

from typing import List, Sequence

import nnabla as nn
import numpy as np

from nnabla_adaloss.core.statistics import ArrayStatistics, statistics_of
from nnabla_adaloss.kernels import CpuKernels
from tests.engine.statistics_sources import Arrays


def test_immediate_statistics_are_of_what_is_there_now() -> None:
    arrays = Arrays([1.0, -4.0, 0.0])
    source, (v,), (position,) = arrays.immediate(), arrays.variables, arrays.positions
    assert source.gradient(position, 8.0) == statistics_of(v.g)
    v.g = 2.0
    assert source.gradient(position, 8.0).abs_max == 2.0
    assert source.data(position) == statistics_of(v.d)
    assert source.complete
    assert source.known() is None
    assert source.finish() == (set(), {position: 0.25}, [], None)
    assert source.finish() == (set(), {}, [], None)
    assert source.table([position]) is None
    assert source.state([position]) == []
    assert source.measured_before() == (set(), set())


def test_weights_that_were_asked_for_are_measured_in_one_call() -> None:
    calls: List[int] = []

    class Counting(CpuKernels):
        def statistics(self, x: nn.NdArray) -> ArrayStatistics:
            calls.append(1)
            return super().statistics(x)

        def statistics_all(self, arrays: Sequence[nn.NdArray]) -> List[ArrayStatistics]:
            calls.append(len(arrays))
            return super().statistics_all(arrays)

    arrays = Arrays([1.0, 2.0], [3.0])
    source = arrays.immediate(kernels=Counting())
    for values in (1.0, 5.0), (7.0, 2.0):
        source.begin(0, again=False)
        for v, value in zip(arrays.variables, values):
            v.d = value  # too late for the second pass, which looked when it began
        found = [source.data(position).abs_max for position in arrays.positions]
        source.finish()
    assert found == [1.0, 5.0]
    assert calls == [0, 1, 1, 2]
    assert source.data(arrays.positions[0]).abs_max == 7.0


def test_other_dtypes_are_read_and_left() -> None:
    arrays = Arrays([0.0, 0.0])
    (v,) = arrays.variables
    v.d = np.array([3, -4], np.int32)
    assert arrays.immediate().data(arrays.positions[0]).abs_max == 4.0
    assert v.data.dtype == np.int32


def test_it_reads_the_graph_that_it_is_bound_to() -> None:
    before, now = Arrays([1.0]), Arrays([2.0])
    source = before.immediate()
    source.bind(now.plan, None)
    assert source.gradient(now.positions[0], 1.0).abs_max == 2.0
    assert source.data(now.positions[0]).abs_max == 2.0
