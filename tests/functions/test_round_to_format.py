# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import nnabla as nn
import nnabla.functions as F
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from nnabla_adaloss import Precision, round_to_format
from tests.functions.graphs import gradients, gradients_of, variable
from tests.kernels.arrays import NARROW_DTYPES

DTYPES = {"float32": np.float32, **{storage.name: dtype for storage, dtype in NARROW_DTYPES.items()}}
every_float = arrays(np.float32, 6, elements=st.floats(width=32))


def rounded(values: np.ndarray, storage: str) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(DTYPES[storage]).astype(np.float32)


@settings(max_examples=100, deadline=None)
@given(every_float, every_float, st.sampled_from(sorted(DTYPES)), st.booleans(), st.booleans())
def test_rounds_values_and_gradients(
    values: np.ndarray, gradient: np.ndarray, storage: str, forward: bool, backward: bool
) -> None:
    x = variable(values)
    y = round_to_format(x, storage, forward, backward)
    y.forward(clear_no_need_grad=True)
    np.testing.assert_array_equal(y.d, rounded(values, storage) if forward else values)
    (arrived,) = gradients([x], lambda: y.backward(gradient))
    np.testing.assert_array_equal(arrived, rounded(gradient, storage) if backward else gradient)


@pytest.mark.parametrize("backward", [False, True])
def test_accumulates(backward: bool) -> None:
    x = variable([1.0, 2.0])
    loss = F.sum(3.0 * round_to_format(x, "float16", backward=backward) + (1.0 + 2.0**-12) * x)
    np.testing.assert_array_equal(gradients_of(loss, x)[0], np.full(2, 4.0 + 2.0**-12))
    loss.backward()
    np.testing.assert_array_equal(x.g, np.full(2, 8.0 + 2.0**-11))


def test_float16_arrays_are_rounded_to_narrower_formats() -> None:
    values = np.array([1.0 + 2.0**-5, 300.0], np.float16)
    y = round_to_format(nn.NdArray.from_numpy_array(values), "float8_e4m3")
    np.testing.assert_array_equal(y.data, rounded(values.astype(np.float32), "float8_e4m3"))


def test_operands_are_rounded_with_a_power_of_two_for_the_array() -> None:
    x = variable([1000.0, 1.0, np.inf])
    y = round_to_format(x, "fp8_hybrid")
    y.forward()
    np.testing.assert_array_equal(y.d, [1024.0, 1.0, np.inf])
    np.testing.assert_array_equal(
        gradients([x], lambda: y.backward(np.float32([2.0**20, 2.0**-3, 5.0])))[0], [2.0**20, 2.0**-3, 5.0]
    )


def test_gradients_are_rounded_at_random_from_a_seed() -> None:
    def drawn(seed: int) -> np.ndarray:
        x = variable(np.ones(500))
        y = round_to_format(x, Precision("float16", "float8_e5m2", stochastic_seed=seed))
        y.forward()
        g = np.linspace(1.0, 1.25, 500)
        return np.array([gradients([x], lambda: y.backward(g))[0] for _ in range(2)])

    first = drawn(3)
    assert set(first.ravel()) == {1.0, 1.25}
    assert not np.array_equal(first[0], first[1])
    np.testing.assert_array_equal(first, drawn(3))
    assert not np.array_equal(first, drawn(4))
