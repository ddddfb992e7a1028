# SPDX-License-Identifier: Apache-2.0
"""Statistics of the arrays of earlier iterations."""

from __future__ import annotations

import json
from typing import Any, List, Sequence

import nnabla as nn
import numpy as np
import pytest

from nnabla_adaloss.core.statistics import pool, statistics_of
from nnabla_adaloss.engine.delayed_statistics import DelayedStatistics
from nnabla_adaloss.engine.statistics import NOTHING_KNOWN
from nnabla_adaloss.kernels import CpuKernels
from nnabla_adaloss.kernels.measurements import HostMeasurements
from tests.engine.statistics_sources import Arrays


def test_delayed_statistics_are_those_of_the_iteration_before_at_the_scale_of_now() -> None:
    arrays = Arrays([1.0, -4.0, 0.0])
    source, (v,), (position,) = arrays.delayed(), arrays.variables, arrays.positions
    source.begin(0, again=False)
    assert source.gradient(position, 8.0).abs_max == 0.0
    assert source.data(position) == NOTHING_KNOWN
    assert not source.complete
    assert source.finish() == (set(), {position: 0.5}, [], None)
    expected = statistics_of(v.g / 8.0)
    v.g, v.d = 7.0, 5.0
    for _ in range(2):  # micro-batches or retries of one iteration
        source.begin(1, again=False)
        assert source.gradient(position, 32.0) == expected.scaled(32.0)
        assert source.data(position).abs_max == 4.0
        assert source.complete
        source.finish()
    source.begin(1, again=True)  # the same batch once more
    assert source.gradient(position, 32.0).abs_max == 7.0
    assert source.data(position).abs_max == 5.0


def test_what_is_known_before_a_pass_is_what_the_pass_would_be_told() -> None:
    arrays = Arrays([1.0, -4.0], [2.0])
    source, (first, second) = arrays.delayed(), arrays.positions
    source.begin(0, again=False)
    source.gradient(first, 4.0)
    source.data(second)
    source.finish()
    source.begin(1, again=False)
    arrays.variables[0].g = 9.0
    source.measure([(first, 1.0)], [])
    source.finish()
    # As it was when the iteration began.
    known = source.known()
    assert known is not None
    assert known.gradient(first, 2.0) == source.gradient(first, 2.0) == statistics_of(np.array([0.5, -2.0]))
    assert known.data(second) == source.data(second)
    assert known.complete
    assert known.stored_data(second) is None
    assert known.data(first) == NOTHING_KNOWN
    assert not known.complete


def test_what_is_measured_for_later_choices_is_known_to_those() -> None:
    arrays = Arrays([1.0, -4.0], [2.0, 0.5])
    source, (first, second) = arrays.delayed(), arrays.positions
    source.measure([(first, 4.0), (second, 2.0)], [second])
    assert source.finish().amax == {first: 1.0, second: 1.0}
    assert source.measured_before() == ({first, second}, {second})
    source.begin(1, again=False)
    assert source.gradient(first, 1.0) == statistics_of(np.array([0.25, -1.0]))
    assert source.gradient(second, 1.0) == statistics_of(np.array([1.0, 0.25]))
    assert source.data(second) == statistics_of(np.array([2.0, 0.5]))


def test_a_choice_does_not_wait_for_what_backward_has_left_empty() -> None:
    arrays = Arrays([1.0])
    source, (position,) = arrays.delayed(), arrays.positions
    arrays.variables[0].grad.zero()
    source.begin(0, again=False)
    assert source.gradient(position, 4.0) == NOTHING_KNOWN
    assert source.complete
    assert source.finish().amax == {}
    source.begin(1, again=False)
    known = source.known()
    assert known is not None
    assert known.gradient(position, 4.0) == NOTHING_KNOWN
    assert known.complete


def test_what_is_not_finite_leaves_what_was_known() -> None:
    arrays = Arrays([1.0, 2.0])
    source, (v,), (position,) = arrays.delayed(), arrays.variables, arrays.positions
    source.gradient(position, 4.0)
    source.data(position)
    source.finish()
    before = source.state([position])
    v.g = v.d = np.nan
    source.gradient(position, 4.0)
    source.data(position)
    assert source.finish().nonfinite == {position}
    assert source.state([position]) == before


def test_the_state_comes_back_in_another_process() -> None:
    arrays = Arrays([1.0, 0.1], [2.0**-24], [0.0])
    # A graph in which the same variables have other positions.
    elsewhere = Arrays([5.0], [1.0, 0.1], [2.0**-24], [0.0])
    source, other, positions, there = (
        arrays.delayed(),
        elsewhere.delayed(),
        arrays.positions,
        elsewhere.positions,
    )
    for position in positions[:2]:
        source.gradient(position, 4.0)
    source.data(positions[2])
    source.finish()
    state = json.loads(json.dumps(source.state(positions)))
    other.load_state(there[1:], state)
    source.begin(1, again=False)
    other.begin(1, again=False)
    assert other.state(there[1:]) == state
    for position, own in zip(positions, there[1:]):
        assert other.gradient(own, 8.0) == source.gradient(position, 8.0)
        assert other.data(own) == source.data(position)
    assert other.gradient(there[0], 8.0) == NOTHING_KNOWN


@pytest.mark.parametrize(
    "state", [3, [[0]], [[0, [1, 2], None]], [[9, None, [0] * 7]], [[0, ["x"] * 7, None]]]
)
def test_states_that_are_none(state: Any) -> None:
    with pytest.raises((TypeError, ValueError, IndexError)):
        Arrays([1.0]).delayed().load_state([1], state)


def test_statistics_of_all_ranks_are_those_of_one_array() -> None:
    """Of three variables, one rank has measured two, another one, and none the third."""
    values = [[[1.0, -2.0], [0.0], [3.0]], [[4.0, 0.5, 0.25], [0.0], [3.0]]]
    ranks = [Arrays(*own) for own in values]
    sources = [arrays.delayed() for arrays in ranks]
    positions = ranks[0].positions
    assert positions == ranks[1].positions
    for source, measured in zip(sources, (positions[:2], positions[:1])):
        source.measure([(position, 1.0) for position in measured], measured)
        source.finish()
    tables = np.stack([source.table(positions) for source in sources])
    assert tables.dtype == np.float64
    expected = pool([statistics_of(np.array(own[0])) for own in values])
    for source in sources:
        source.adopt(positions, tables)
        source.begin(1, again=False)
        first, second, third = positions
        assert source.gradient(first, 1.0) == expected
        assert source.data(first) == expected
        assert source.gradient(second, 1.0).zeros == 1
        assert source.gradient(third, 1.0) == NOTHING_KNOWN


def test_other_ranks_are_told_only_what_is_new() -> None:
    arrays = Arrays([1.0], [2.0])
    source, positions = arrays.delayed(), arrays.positions
    for position in positions:
        source.measure([(position, 1.0)], [])
        source.finish()
        table = source.table(positions)
        assert table is not None
        assert [bool(row.any()) for row in table[0]] == [p == position for p in positions]
        source.adopt(positions, table[np.newaxis])


def test_an_interruption_leaves_no_ticket_without_a_measurement() -> None:
    """A pass that ends early, even within its own end, spoils nothing for the next one."""
    measurements = HostMeasurements(CpuKernels())
    arrays = Arrays(*([1.0, 2.0] for _ in range(5)))
    source = arrays.delayed(measurements=measurements)
    for position in arrays.positions:
        source.gradient(position, 1.0)
    measurements.fetch = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        source.finish()
    del measurements.fetch
    arrays.variables[1].g = 7.0
    second = arrays.positions[1]
    source.gradient(second, 1.0)
    assert source.finish() == (set(), {second: 7.0}, [], None)
    source.begin(1, again=False)
    assert source.gradient(second, 1.0).abs_max == 7.0


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


def ask(source: DelayedStatistics, arrays: Arrays, iteration: int) -> List[float]:
    source.begin(iteration, again=False)
    return [source.data(position).abs_max for position in arrays.positions]


def test_weights_are_measured_together_after_an_update_and_not_again() -> None:
    measurements = Recorder()
    arrays = Arrays(*([1.0, float(i)] for i in range(3)))
    source = arrays.delayed(measurements=measurements)
    ask(source, arrays, 0)
    source.finish()
    assert measurements.together == [1, 1, 1]
    for w in arrays.variables:
        w.d = 5.0  # an update
    source.measure_weights(arrays.positions)
    assert measurements.together[3:] == [3]
    # What is being measured is for the iteration after this one.
    assert ask(source, arrays, 1) == [1.0, 1.0, 2.0]
    assert measurements.together[4:] == []
    source.finish()
    arrays.variables[1].d = 7.0  # by a loop that tells nobody
    assert ask(source, arrays, 2) == [5.0] * 3
    assert measurements.together[4:] == [1, 1, 1]
    source.finish()
    assert ask(source, arrays, 3) == [5.0, 7.0, 5.0]


def test_gradients_and_data_are_measured_in_one_call() -> None:
    measurements = Recorder()
    arrays = Arrays([1.0], [2.0], [3.0])
    source, positions = arrays.delayed(measurements=measurements), arrays.positions
    source.measure([(position, 1.0) for position in positions[:2]], positions)
    assert measurements.together == [5]
    assert source.finish().amax == {positions[0]: 1.0, positions[1]: 2.0}
    assert ask(source, arrays, 1) == [1.0, 2.0, 3.0]


def test_activations_are_measured_in_each_pass_that_asks() -> None:
    measurements = Recorder()
    arrays = Arrays([1.0, 2.0], leaves=False)
    source = arrays.delayed(measurements=measurements)
    for iteration, value in enumerate((3.0, 4.0, 5.0)):
        arrays.variables[0].d = value
        found = ask(source, arrays, iteration)
        source.finish()
    assert found == [4.0]
    assert measurements.together == [1, 1, 1]


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_arrays_that_are_watched(bad: float) -> None:
    source = Arrays([1.0]).delayed()
    assert source.finish().watched_finite is None
    for value, finite in ((1.0, True), (bad, False), (2.0, True)):
        watched = Arrays([3.0, 4.0], [value]).variables
        source.watch([v.data for v in watched])
        assert source.finish().watched_finite is finite
    source.watch([])
    assert source.finish().watched_finite is None
