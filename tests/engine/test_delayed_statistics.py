# SPDX-License-Identifier: Apache-2.0
"""Statistics of the arrays of the iteration before."""

from __future__ import annotations

import json
from typing import Any, Dict, List, Sequence

import nnabla as nn
import nnabla.functions as F
import numpy as np
import pytest

from nnabla_adaloss.core.statistics import pool, statistics_of
from nnabla_adaloss.engine.delayed_statistics import NOTHING_KNOWN, DelayedStatistics
from nnabla_adaloss.kernels import CpuKernels
from nnabla_adaloss.kernels.measurements import HostMeasurements
from nnabla_adaloss.kernels.scratch import ScratchPool
from tests.engine.statistics_sources import delayed, variable


def test_delayed_statistics_are_those_of_the_iteration_before_at_the_scale_of_now() -> None:
    source, v = delayed(), variable(1.0, -4.0, 0.0)
    source.begin(0, anew=False)
    assert source.gradient(v, 1, 8.0).abs_max == 0.0
    assert source.data(v, 1) == NOTHING_KNOWN
    assert source.finish() == (set(), {1: 0.5}, [], None)
    expected = statistics_of(v.g / 8.0)
    v.g, v.d = 7.0, 5.0
    for _ in range(2):  # micro-batches or retries of one iteration
        source.begin(1, anew=False)
        assert source.gradient(v, 1, 32.0) == expected.scaled(32.0)
        assert source.data(v, 1).abs_max == 4.0
        source.finish()
    source.begin(1, anew=True)  # the same batch once more
    assert source.gradient(v, 1, 32.0).abs_max == 7.0
    assert source.data(v, 1).abs_max == 5.0


def test_what_is_not_finite_leaves_what_was_known() -> None:
    source, v = delayed(), variable(1.0, 2.0)
    source.gradient(v, 1, 4.0)
    source.data(v, 1)
    source.finish()
    before = source.state([1])
    v.g = v.d = np.nan
    source.gradient(v, 1, 4.0)
    source.data(v, 1)
    source.finish()
    assert source.state([1]) == before


def test_the_state_comes_back_in_another_process() -> None:
    keys, elsewhere = [11, 12, 13], [21, 22, 23]
    source, variables = delayed(), [variable(1.0, 0.1), variable(2.0**-24), variable(0.0)]
    for key, v in zip(keys[:2], variables):
        source.gradient(v, key, 4.0)
    source.data(variables[2], keys[2])
    source.finish()
    state = json.loads(json.dumps(source.state(keys)))
    other = delayed()
    other.load_state(elsewhere, state)
    source.begin(1, anew=False)
    other.begin(1, anew=False)
    assert other.state(elsewhere) == state
    for key, there, v in zip(keys, elsewhere, variables):
        assert other.gradient(v, there, 8.0) == source.gradient(v, key, 8.0)
        assert other.data(v, there) == source.data(v, key)


@pytest.mark.parametrize(
    "state", [3, [[0]], [[0, [1, 2], None]], [[9, None, [0] * 7]], [[0, ["x"] * 7, None]]]
)
def test_states_that_are_none(state: Any) -> None:
    with pytest.raises((TypeError, ValueError, IndexError)):
        delayed().load_state([1], state)


def known(arrays: Dict[int, List[float]]) -> DelayedStatistics:
    source = delayed()
    for key, values in arrays.items():
        source.gradient(variable(*values), key, 1.0)
        source.data(variable(*values), key)
    source.finish()
    return source


def test_statistics_of_all_ranks_are_those_of_one_array() -> None:
    parts = [{1: [1.0, -2.0], 2: [0.0]}, {1: [4.0, 0.5, 0.25]}]
    sources = [known(part) for part in parts]
    tables = np.stack([source.table([1, 2, 3]) for source in sources])
    assert tables.dtype == np.float64
    for source in sources:
        source.adopt([1, 2, 3], tables)
        source.begin(1, anew=False)
        v = variable(0.0)
        expected = pool([statistics_of(np.array(part[1])) for part in parts])
        assert source.gradient(v, 1, 1.0) == expected
        assert source.data(v, 1) == expected
        assert source.gradient(v, 2, 1.0).zeros == 1
        assert source.gradient(v, 3, 1.0) == NOTHING_KNOWN


def test_an_interruption_leaves_no_ticket_without_a_measurement() -> None:
    """A pass that ends early, even within its own end, spoils nothing for the next one."""
    measurements = HostMeasurements(CpuKernels())
    source, v = DelayedStatistics(measurements, ScratchPool(), None), variable(1.0, 2.0)
    for key in range(5):
        source.gradient(v, key, 1.0)
    measurements.fetch = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        source.finish()
    del measurements.fetch
    source.gradient(variable(7.0), 1, 1.0)
    assert source.finish() == (set(), {1: 7.0}, [], None)
    source.begin(1, anew=False)
    assert source.gradient(v, 1, 1.0).abs_max == 7.0


def interrupt() -> Any:
    raise KeyboardInterrupt


class Recorder(HostMeasurements):
    """Measurements that write down how many arrays came together."""

    def __init__(self) -> None:
        super().__init__(CpuKernels())
        self.together: List[int] = []

    def measure(self, arrays: Sequence[nn.NdArray]) -> List[int]:
        if arrays:
            self.together.append(len(arrays))
        return super().measure(arrays)


def test_weights_are_measured_together_after_an_update_and_not_again() -> None:
    measurements = Recorder()
    source = DelayedStatistics(measurements, ScratchPool(), None)
    weights = [variable(1.0, float(i)) for i in range(3)]

    def ask(iteration: int) -> List[float]:
        source.begin(iteration, anew=False)
        return [source.data(w, key).abs_max for key, w in enumerate(weights)]

    ask(0)
    source.finish()
    assert measurements.together == [1, 1, 1]
    for w in weights:
        w.d = 5.0  # an update
    source.measure_weights()
    assert measurements.together[3:] == [3]
    assert ask(1) == [1.0, 1.0, 2.0]
    source.finish()
    ask(1)  # a second pass of the iteration
    source.finish()
    assert measurements.together[4:] == []
    weights[1].d = 7.0  # by a loop that tells nobody
    assert ask(2) == [5.0] * 3
    assert measurements.together[4:] == [3]
    source.finish()
    assert ask(3) == [5.0, 7.0, 5.0]


def test_activations_are_measured_in_each_pass() -> None:
    measurements = Recorder()
    source = DelayedStatistics(measurements, ScratchPool(), None)
    activation = F.relu(variable(1.0, 2.0))
    for iteration in range(2):
        activation.forward()
        source.begin(iteration, anew=False)
        source.data(activation, 1)
        source.finish()
        source.measure_weights()
    assert measurements.together == [1, 1]


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_arrays_that_are_watched(bad: float) -> None:
    source = delayed()
    assert source.finish().watched_finite is None
    for value, finite in ((1.0, True), (bad, False), (2.0, True)):
        source.watch([variable(3.0, 4.0).data, variable(value).data])
        assert source.finish().watched_finite is finite
    assert source.finish().watched_finite is None
