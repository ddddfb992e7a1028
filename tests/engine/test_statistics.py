# SPDX-License-Identifier: Apache-2.0
"""What statistics of this iteration and of the one before have in common."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nnabla_adaloss.core.statistics import statistics_of
from nnabla_adaloss.engine.statistics_source import StatisticsSource
from tests.engine.statistics_sources import delayed, immediate, variable


class Seen:
    """A storage that has seen some arrays already."""

    def __init__(self, **found: Any) -> None:
        self.found = found

    def gradient_statistics(self, key: int) -> Any:
        return self.found.get(f"g{key}")

    def data_statistics(self, key: int) -> Any:
        return self.found.get(f"d{key}")


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("make", [immediate, delayed])
def test_what_is_not_finite_is_found_once(make: Any, bad: float) -> None:
    source: StatisticsSource = make()
    good, spoilt = variable(1.0, 2.0), variable(1.0, bad)
    source.gradient(good, 1, 4.0)
    source.gradient(spoilt, 2, 4.0)
    assert source.finish().nonfinite == {2}
    assert source.finish().nonfinite == set()


@pytest.mark.parametrize("make", [immediate, delayed])
def test_a_lazily_zero_gradient_stays_so(make: Any) -> None:
    source, v = make(), variable(1.0)
    v.grad.zero()
    source.gradient(v, 1, 4.0)
    assert v.grad.zeroing
    assert source.finish().nonfinite == set()


@pytest.mark.parametrize("make", [immediate, delayed])
def test_what_a_storage_has_seen_is_not_read_again(make: Any) -> None:
    g, d = statistics_of(np.array([3.0])), statistics_of(np.array([5.0]))
    source, v = make(Seen(g1=g, d1=d)), variable(1.0)
    for iteration in range(2):
        source.begin(iteration, anew=False)
        found = source.gradient(v, 1, 1.0), source.data(v, 1)
        source.finish()
    assert found == (g, d)
