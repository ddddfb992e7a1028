# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import statistics

import pytest
import scipy.special
from hypothesis import example, given
from hypothesis import strategies as st

from nnabla_adaloss.core.normal import erfinv


@example(y=2.2250738585e-313)
@given(y=st.one_of(st.floats(-0.999999, 0.999999), st.floats(1e-300, 1e-2), st.floats(-1e-2, -1e-300)))
def test_as_scipy_has_it(y: float) -> None:
    # Subnormal numbers lie 5e-324 apart, more than 1e-14 of them: SciPy rounds twice.
    assert erfinv(y) == pytest.approx(float(scipy.special.erfinv(y)), rel=1e-14, abs=1e-323)


def test_next_to_one() -> None:
    nearest = 1.0 - 2.0**-53
    assert erfinv(nearest) == pytest.approx(float(scipy.special.erfinv(nearest)), rel=0.02)


@pytest.mark.parametrize("y", [-1.0, 1.0, 1.5])
def test_there_is_none_outside(y: float) -> None:
    with pytest.raises(statistics.StatisticsError):
        erfinv(y)
