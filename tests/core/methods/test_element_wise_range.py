# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
import tracemalloc
from typing import Any, Optional, Tuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnabla_adaloss import AdaLossConfig, get_loss_scale_by_abs_range, get_loss_scale_by_element_wise_range


def element_wise(g: np.ndarray, W: Optional[np.ndarray], ratio: Optional[float], **options: Any) -> float:
    config = AdaLossConfig(max_rescue_ratio=ratio)
    result = get_loss_scale_by_element_wise_range(g, W, config=config, **options)
    assert result.shape == ()
    return float(result)


def plain(g: np.ndarray, W: np.ndarray, ratio: Optional[float], fan_in: float) -> float:
    """The same from an array of every product."""
    products = np.abs(g.astype(np.float64)[:, :, None] * W.astype(np.float64)[None])
    products = np.sort(products[products > 0])[::-1]
    if not products.size:
        return 1.0
    lower = np.maximum(6e-8 / products, 1.0)
    if ratio is not None:
        lower = lower[: max(int(ratio * products.size), 1)]
    return min(lower.max(), 65504.0 / products[0] / fan_in)


@given(
    st.integers(0, 2**32 - 1),
    st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5)),
    st.sampled_from([None, 0.01, 0.5, 0.9, 1.0]),
    st.integers(-40, 12),
    st.sampled_from([np.float16, np.float32]),
)
def test_agrees_with_all_products(
    seed: int, shape: Tuple[int, int, int], ratio: Optional[float], exponent: int, dtype: Any
) -> None:
    random = np.random.RandomState(seed)
    N, C, M = shape
    g = (random.standard_normal((N, C)) * random.randint(0, 2, (N, C)) * 2.0**exponent).astype(dtype)
    W = (random.standard_normal((C, M)) * random.randint(0, 2, (C, M))).astype(dtype)
    ours = element_wise(g, W, ratio, fan_in=C)
    assert math.isclose(ours, plain(g, W, ratio, C), rel_tol=1e-14)


def test_equal_products_are_counted_each() -> None:
    g, W = np.full((3, 2), 1e-8), np.array([[1.0, 1.0], [1e-3, 1e-3]])
    assert math.isclose(element_wise(g, W, 0.5, fan_in=2), 6.0)


def test_convolution_pairs_channels() -> None:
    random = np.random.RandomState(0)
    g, W = random.standard_normal((2, 3, 4, 5)) * 1e-6, random.standard_normal((3, 2, 3, 3)) * 0.1
    flat_g, flat_W = g.transpose(0, 2, 3, 1).reshape(-1, 3), W.reshape(3, -1)
    ours = element_wise(g, W, 0.9, fan_in=27)
    assert math.isclose(ours, plain(flat_g, flat_W, 0.9, 27), rel_tol=1e-14)


def test_products_without_a_weight_are_the_elements() -> None:
    g = np.array([1e-8, -1e-7, 0.0])
    assert math.isclose(element_wise(g, None, None), 6.0)
    # Nothing is summed: K is 1, whatever is given.
    assert element_wise(np.array([1e5, 6e4]), None, None, fan_in=7) == 65504.0 / 1e5


@pytest.mark.parametrize(("ratio", "kept"), [(0.01, 1e-8), (0.5, 1e-8), (0.67, 1e-9), (1.0, 1e-10)])
def test_one_product_or_more_is_kept(ratio: float, kept: float) -> None:
    g = np.array([1e-9, 1e-8, 1e-10])
    assert math.isclose(element_wise(g, None, ratio), 6e-8 / kept)
    for weight in (0.25, 4.0):
        scale = element_wise(g[None], np.full((3, 1), weight), ratio, fan_in=1)
        assert math.isclose(scale, max(6e-8 / (weight * kept), 1.0))


def test_memory_is_that_of_the_inputs() -> None:
    g, W = np.full((200, 60), 1e-8, np.float32), np.ones((60, 300), np.float32)
    tracemalloc.start()
    element_wise(g, W, 0.5, fan_in=60)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * (g.nbytes + W.nbytes) < 200 * 60 * 300 * 4


@pytest.mark.parametrize("W", [np.ones((3, 2)), np.ones(2)])
def test_shapes_that_do_not_meet(W: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"do not meet: axis 1 of g \(N, C, ...\) .* are the same channels$"):
        element_wise(np.ones((4, 2)), W, None, fan_in=2)


# ---- extremes alone


def abs_range(g: Any, W: Optional[np.ndarray], **arguments: Any) -> float:
    result = get_loss_scale_by_abs_range(np.asarray(g), W, config=AdaLossConfig(), **arguments)
    assert result.shape == ()
    return float(result)


def test_the_smallest_product_reaches_u_min() -> None:
    g, W = [[0.0, 1e-8, -1e-3]], np.array([[0.5], [-0.25], [0.0]])
    assert math.isclose(abs_range(g, W, fan_in=1) * 1e-8 * 0.25, 6e-8)
    assert math.isclose(abs_range(g, None) * 1e-8, 6e-8)
    assert math.isclose(abs_range(g, W, fan_in=3) * 3, abs_range(g, W))


def test_products_below_1e_15_are_not_chased() -> None:
    g, W = [1e-12, 1e-20], np.array([1e-3])
    assert abs_range(g, W, fan_in=1) == 6e-8 / 1e-15
