# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np


def test_the_distance_of_a_distribution_to_itself_is_small() -> None:
    from common.discrepancy import discrepancy

    random = np.random.RandomState(0)
    a, b = random.randn(300, 4).astype(np.float32), random.randn(300, 4).astype(np.float32)
    assert discrepancy(a, b) < 0.05 < discrepancy(a, b + 1.0) < discrepancy(a, b + 3.0)
    assert np.isnan(discrepancy(np.full_like(a, np.nan), b))


def test_images_in_float16_have_a_finite_distance() -> None:
    from common.discrepancy import discrepancy

    random = np.random.RandomState(0)
    a, b = random.randn(700, 64).astype(np.float16), random.randn(700, 64).astype(np.float32)
    expected = discrepancy(a.astype(np.float32), b)
    assert discrepancy(a, b) == discrepancy(a, b.astype(np.float32)) == expected
    assert np.isfinite(discrepancy(a, b.astype(np.float16)))
