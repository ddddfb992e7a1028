# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from typing import Any, Optional, Tuple

import numpy as np
import pytest
import scipy.special
from hypothesis import example, given
from hypothesis import strategies as st

from nnabla_adaloss import AdaLossConfig, get_loss_scale_by_approx_range
from nnabla_adaloss.core.methods import ApproxRange, LognormalRange, Range
from nnabla_adaloss.core.methods.approx_range import erfinv

CONFIG = AdaLossConfig()


def approx(g: np.ndarray, W: Optional[np.ndarray] = None, config: Any = CONFIG, **options: Any) -> float:
    return float(get_loss_scale_by_approx_range(g, W, config=config, **options))


def normal(seed: int, shape: Tuple[int, ...], sigma: float) -> np.ndarray:
    return np.random.RandomState(seed).standard_normal(shape) * sigma


def test_sigma_min_leaves_the_share_p_below_u_min() -> None:
    share_below = math.erf(CONFIG.range[0] / (ApproxRange(0.01).sigma_min(CONFIG.range) * math.sqrt(2.0)))
    assert math.isclose(share_below, 0.01)


@pytest.mark.parametrize("p", [1e-3, 1e-2, 0.1])
def test_a_share_p_of_the_input_gradient_underflows(p: float) -> None:
    # Products of independent normal variables, K / 2 of which survive a ReLU: the model holds for their sums.
    config = AdaLossConfig(n_uf_threshold=p)
    K = 512
    g, W = normal(0, (400, K), 1e-7), normal(1, (K, 400), 1e-2)
    half = np.random.RandomState(2).uniform(size=g.shape) < 0.5
    scale = approx(g, W, config, fan_in=K)
    assert scale > 1.0
    share = np.mean(np.abs(scale * (g * half) @ W) < config.range[0])
    assert 0.8 * p < share < 1.2 * p


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_never_zero_nor_infinite_without_a_weight(dtype: Any) -> None:
    limits = np.finfo(dtype)
    for value in (limits.max, limits.smallest_subnormal):
        for lognormal in (False, True):
            assert 0.0 < approx(np.full((2, 2), value, dtype), lognormal=lognormal) < math.inf


def test_a_deviation_under_a_large_mean_keeps_its_digits() -> None:
    g = 1.0 + 1e-5 * np.array([-1.0, 1.0])
    config = AdaLossConfig(u_min=1e-6)
    assert math.isclose(approx(g, None, config), ApproxRange().sigma_min(config.range) / 1e-5, rel_tol=1e-5)


@pytest.mark.parametrize(("W", "fan_in"), [(normal(6, (6, 3, 5, 2), 0.1), 60), (np.array(0.1), 1)])
def test_fan_in_is_read_from_the_weight_by_default(W: np.ndarray, fan_in: int) -> None:
    g = normal(5, (2, 6, 4, 4), 1e-6)
    assert approx(g, W) == approx(g, W, fan_in=fan_in)


def test_a_scale_beyond_all_numbers_is_limited() -> None:
    # Magnitudes 80 decades apart, of which hardly one may underflow: exp of more than 709 is asked for.
    g = np.array([1e-43, 1e37], np.float32)
    found = LognormalRange(1e-300).scale(g, None, range=Range(6e-8, 65504.0), fan_in=1.0)
    assert found == 65504.0 / float(g[1])


def test_refused() -> None:
    for fan_in in (0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="fan_in"):
            approx(np.ones(2), np.ones((2, 2)), fan_in=fan_in)
    with pytest.raises(ValueError, match="^lognormal=True is defined without a weight only"):
        approx(np.ones(2), np.ones((2, 2)), lognormal=True)


# ---- the inverse of the error function


@example(y=2.2250738585e-313)
@given(y=st.one_of(st.floats(-0.999999, 0.999999), st.floats(1e-300, 1e-2), st.floats(-1e-2, -1e-300)))
def test_erfinv_is_as_scipy_has_it(y: float) -> None:
    # Subnormal numbers lie 5e-324 apart, more than 1e-14 of them: SciPy rounds twice.
    assert erfinv(y) == pytest.approx(float(scipy.special.erfinv(y)), rel=1e-14, abs=1e-323)


def test_erfinv_next_to_one() -> None:
    nearest = 1.0 - 2.0**-53
    assert erfinv(nearest) == pytest.approx(float(scipy.special.erfinv(nearest)), rel=0.02)
