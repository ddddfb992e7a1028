# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import statistics

import pytest
import scipy.special
from hypothesis import given
from hypothesis import strategies as st

from nnabla_adaloss.core.normal import erfinv


@given(y=st.one_of(st.floats(-0.999999, 0.999999), st.floats(1e-300, 1e-2), st.floats(-1e-2, -1e-300)))
def test_as_scipy_has_it(y: float) -> None:
    assert erfinv(y) == pytest.approx(float(scipy.special.erfinv(y)), rel=1e-14, abs=0.0)


def test_next_to_one() -> None:
    nearest = 1.0 - 2.0**-53
    assert erfinv(nearest) == pytest.approx(float(scipy.special.erfinv(nearest)), rel=0.02)


@pytest.mark.parametrize("y", [-1.0, 1.0, 1.5])
def test_there_is_none_outside(y: float) -> None:
    with pytest.raises(statistics.StatisticsError):
        erfinv(y)
