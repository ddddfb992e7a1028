# SPDX-License-Identifier: Apache-2.0
"""What is seen of a gradient, and the row of it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, List

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnabla_adaloss import LayerRecord, LayerScaled, Reason
from nnabla_adaloss.core.formats import FORMATS, Format
from nnabla_adaloss.core.statistics import statistics_of
from nnabla_adaloss.monitor.events import GradientSeen
from nnabla_adaloss.monitor.rows import row_of

from .watched import layer


def seen(values: List[float], name: str = "float16") -> GradientSeen:
    array = np.array(values, np.float32)
    exponents = np.bincount((array.view(np.uint32) >> 23) & 0xFF, minlength=256)
    return GradientSeen(statistics_of(array), exponents, FORMATS[name])


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=30),
    st.sampled_from(sorted(FORMATS)),
)
def test_subnormals_are_those_below_the_normal_range(values: List[float], name: str) -> None:
    storage: Format = FORMATS[name]
    magnitudes = np.abs(np.array(values, np.float32)).astype(np.float64)
    expected = np.count_nonzero((magnitudes > 0) & (magnitudes < storage.smallest_normal))
    assert seen(values, name).subnormals == expected


@pytest.mark.parametrize(
    ("values", "bits"),
    [
        ([65504.0, 1.0], 0.0),
        ([-32752.0], 1.0),
        ([0.0, 0.0], math.inf),
        ([1.0, math.inf], 0.0),
        ([math.nan], 0.0),
    ],
)
def test_headroom(values: List[float], bits: float) -> None:
    assert seen(values).headroom == bits


def test_shares_count_elements_that_could_be_lost() -> None:
    row = layer(1, "a", underflowed=10, zeros=60)
    assert row.underflow == 10 / 50
    assert row.overflow == 0.01
    unknown = layer(1, "a", underflowed=None, overflowed=None, zeros=60)
    assert (unknown.underflow, unknown.overflow) == (None, None)
    assert layer(1, "a", zeros=100, underflowed=0).underflow == 0.0


@pytest.mark.parametrize(
    ("values", "headroom", "exponents"),
    [
        ([0.0, 0.0], None, []),
        ([0.0, 3.0, -0.25, 2.0, float("inf")], 0.0, [-2, 1, 0, 0, 2]),
        ([2.0**-126, 2.0**-127], pytest.approx(142.0, abs=0.01), [-126, 1]),
    ],
)
def test_contents_of_a_gradient(values: List[float], headroom: Any, exponents: List[int]) -> None:
    record = LayerRecord(1, "a", 2.0, 2.0, 8.0, 16.0, 1.0, None, None, Reason.HELD)
    look: Any = SimpleNamespace(gradient=seen(values))
    row = row_of(LayerScaled(record, look), histograms=True, data=False)
    assert (row.alpha, row.scale, row.reason) == (2.0, 16.0, "held")
    assert (row.elements, row.headroom, row.exponents) == (len(values), headroom, exponents)
    look.gradient = None
    assert row_of(LayerScaled(record, look), histograms=True, data=False).elements is None
