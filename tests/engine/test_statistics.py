# SPDX-License-Identifier: Apache-2.0
"""What is known, and what statistics of this iteration and of earlier ones have in common."""

from __future__ import annotations

from typing import Any, Dict

import numpy as np
import pytest

from nnabla_adaloss.core.statistics import statistics_of
from nnabla_adaloss.engine.statistics import NOTHING_KNOWN, KnownStatistics, StatisticsSource
from tests.engine.statistics_sources import Arrays

SOURCES = pytest.mark.parametrize("make", [Arrays.immediate, Arrays.delayed])


class Seen:
    """A storage that has seen some arrays already."""

    def __init__(self, gradients: Dict[int, Any], data: Dict[int, Any]) -> None:
        self._gradients, self._data = gradients, data

    def gradient_statistics(self, key: int) -> Any:
        return self._gradients.get(key)

    def data_statistics(self, key: int) -> Any:
        return self._data.get(key)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@SOURCES
def test_what_is_not_finite_is_found_once(make: Any, bad: float) -> None:
    arrays = Arrays([1.0, 2.0], [1.0, bad])
    source: StatisticsSource = make(arrays)
    good, spoilt = arrays.positions
    source.gradient(good, 4.0)
    source.gradient(spoilt, 4.0)
    assert source.finish().nonfinite == {spoilt}
    assert source.finish().nonfinite == set()


@SOURCES
def test_a_lazily_zero_gradient_stays_so(make: Any) -> None:
    arrays = Arrays([1.0])
    source: StatisticsSource = make(arrays)
    arrays.variables[0].grad.zero()
    source.gradient(arrays.positions[0], 4.0)
    assert arrays.variables[0].grad.zeroing
    assert source.finish().nonfinite == set()


@SOURCES
def test_what_a_storage_has_seen_is_not_read_again(make: Any) -> None:
    g, d = statistics_of(np.array([3.0])), statistics_of(np.array([5.0]))
    arrays = Arrays([1.0])
    key, (position,) = hash(arrays.variables[0]), arrays.positions
    source: StatisticsSource = make(arrays, Seen({key: g}, {key: d}))
    for iteration in range(2):
        source.begin(iteration, again=False)
        found = source.gradient(position, 1.0), source.data(position)
        assert source.stored_data(position) == d
        source.finish()
    assert found == (g, d)


@SOURCES
def test_without_a_storage_nothing_is_stored(make: Any) -> None:
    arrays = Arrays([1.0])
    assert make(arrays).stored_data(arrays.positions[0]) is None


def test_what_is_known_comes_at_the_scale_that_is_asked_for() -> None:
    g, d = statistics_of(np.array([3.0, -0.5])), statistics_of(np.array([5.0]))
    known = KnownStatistics({4: g}, {7: d})
    assert known.gradient(4, 8.0) == g.scaled(8.0)
    assert known.data(7) == d
    assert known.stored_data(7) is None
    assert known.complete


@pytest.mark.parametrize("ask", [lambda k: k.gradient(7, 1.0), lambda k: k.data(4)])
def test_what_is_not_known_is_remembered_as_missing(ask: Any) -> None:
    known = KnownStatistics({4: statistics_of(np.array([3.0]))}, {7: statistics_of(np.array([5.0]))})
    assert ask(known) == NOTHING_KNOWN
    assert not known.complete


def test_stored_data_is_known_where_a_storage_rounds() -> None:
    d = statistics_of(np.array([5.0]))
    known = KnownStatistics({}, {7: d}, stored=True)
    assert known.stored_data(7) == d
    assert known.complete
    assert known.stored_data(8) == NOTHING_KNOWN
    assert not known.complete


def test_no_elements_are_known() -> None:
    with pytest.raises(TypeError, match="hold no elements"):
        KnownStatistics({}, {}).matrices(0, 0)
