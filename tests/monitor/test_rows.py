# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from types import SimpleNamespace
from typing import Any, List

import pytest

from nnabla_adaloss import LayerRecord, Reason
from nnabla_adaloss.monitor import LayerScaled
from nnabla_adaloss.monitor.rows import row_of

from .test_events import seen
from .watched import layer


def test_shares_are_of_what_could_be_lost() -> None:
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
def test_what_a_gradient_holds(values: List[float], headroom: Any, exponents: List[int]) -> None:
    record = LayerRecord(1, "a", 2.0, 2.0, 8.0, 16.0, 1.0, None, None, Reason.HELD)
    look: Any = SimpleNamespace(gradient=seen(values))
    row = row_of(LayerScaled(record, look), histograms=True, data=False)
    assert (row.alpha, row.scale, row.reason) == (2.0, 16.0, "held")
    assert (row.elements, row.headroom, row.exponents) == (len(values), headroom, exponents)
    look.gradient = None
    assert row_of(LayerScaled(record, look), histograms=True, data=False).elements is None
