# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from typing import List

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnabla_adaloss.core import FORMATS, statistics_of
from nnabla_adaloss.core.formats import Format
from nnabla_adaloss.monitor import GradientSeen


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
