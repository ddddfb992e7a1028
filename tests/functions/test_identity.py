# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any, Callable, Tuple

import nnabla as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from nnabla_adaloss import (
    AdaLossConfig,
    ScaleTracker,
    adaptive_loss_scaling,
    branch,
    cast_loss_scaling,
    loss_scaling,
    round_to_format,
    unscale,
)
from nnabla_adaloss.functions.identity import IdentityFunction

IDENTITIES = {
    "loss_scaling": lambda x: loss_scaling(x, 8.0),
    "loss_scaling, tracked": lambda x: loss_scaling(x, ScaleTracker()),
    "unscale": lambda x: unscale(x, 8.0),
    "unscale, tracked": lambda x: unscale(x, ScaleTracker()),
    "cast_loss_scaling": lambda x: cast_loss_scaling(x, ScaleTracker()),
    "branch": lambda x: branch(x, 2, ScaleTracker())[1],
    "branch, of one": lambda x: branch(x, 1)[0],
    "adaptive_loss_scaling": lambda x: adaptive_loss_scaling(x, nn.NdArray((2, 2)), ScaleTracker()),
    "round_to_format": lambda x: round_to_format(x, "float16", forward=False),
}
every_identity = pytest.mark.parametrize("function", IDENTITIES.values(), ids=list(IDENTITIES))
# Behind a layer that does not exist, only arrays are handed on.
of_variables = [name for name in IDENTITIES if name != "adaptive_loss_scaling"]
SPECIAL = np.array([0.0, -0.0, 1e-45, -65505.0, 3e38, np.inf, -np.inf, np.nan], np.float32)


def same(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(np.signbit(actual), np.signbit(expected))


@every_identity
@pytest.mark.parametrize("shape", [(), (0,), (1,), (8,), (2, 2, 2)])
def test_hands_an_ndarray_on(function: Callable[[Any], Any], shape: Tuple[int, ...]) -> None:
    values = np.resize(SPECIAL, shape)
    y = function(nn.NdArray.from_numpy_array(values))
    assert isinstance(y, nn.NdArray)
    assert y.shape == shape
    same(y.data, values)


@pytest.mark.parametrize("name", of_variables)
def test_hands_a_variable_on(name: str) -> None:
    x = nn.Variable.from_numpy_array(SPECIAL)
    y = IDENTITIES[name](x)
    y.forward(clear_no_need_grad=True)
    same(y.d, SPECIAL)
    assert y.data is not x.data
    with nn.auto_forward():
        same(IDENTITIES[name](x).d, SPECIAL)


@every_identity
def test_float16_stays_float16_and_other_types_become_float32(function: Callable[[Any], Any]) -> None:
    halves = nn.NdArray.from_numpy_array(np.array([1.5, -2.0], np.float16))
    if function is not IDENTITIES["round_to_format"]:
        assert function(halves).dtype == np.float16
    for dtype in (np.float64, np.int64, np.uint8):
        y = function(nn.NdArray.from_numpy_array(np.array([1, 2], dtype)))
        assert y.dtype == np.float32
        np.testing.assert_array_equal(y.data, [1, 2])


@every_identity
def test_a_lazy_zero_is_zero(function: Callable[[Any], Any]) -> None:
    x = nn.NdArray((3,))
    x.zero()
    np.testing.assert_array_equal(function(x).data, np.zeros(3))


@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_branch_is_a_tuple(n: int) -> None:
    for x in (nn.Variable((2, 3)), nn.NdArray.from_numpy_array(np.zeros((2, 3), np.float32))):
        for outputs in (branch(x, n, ScaleTracker()), branch(x, n)):
            assert isinstance(outputs, tuple)
            assert [(type(y), y.shape) for y in outputs] == [(type(x), (2, 3))] * n


X = nn.Variable((1,))


@pytest.mark.parametrize(
    ("call", "named"),
    [
        *((lambda scale=scale: loss_scaling(X, scale), "scale") for scale in (0.0, np.inf, np.nan, True)),
        *((lambda scale=scale: unscale(X, scale), "scale") for scale in (-1.0, np.inf, np.nan, "8")),
        *((lambda scale=scale: ScaleTracker(scale=scale), "scale") for scale in (0.0, np.nan, None)),
        *((lambda n=n: branch(X, n, ScaleTracker()), "n") for n in (0, 1.5)),
        (lambda: branch(X, 2, 8.0), "tracker must be"),
        (lambda: cast_loss_scaling(X, 8.0), "tracker must be"),
        (lambda: round_to_format(X, "float17"), "storage"),
        (lambda: ScaleTracker({"n_uf_threshold": 0.1}), "config must be an AdaLossConfig"),
        (lambda: ScaleTracker(AdaLossConfig(delay=1)), r"config\.delay is 1"),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[], Any], named: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{named}"):
        call()


@pytest.mark.parametrize("wrong", [None, 1.0, np.zeros(3)])
def test_an_input_that_nnabla_does_not_know_is_refused(wrong: Any) -> None:
    for function in IDENTITIES.values():
        with pytest.raises(TypeError, match=r"^[xw] must be an nnabla\.Variable or nnabla\.NdArray"):
            function(wrong)
    with pytest.raises(TypeError, match=r"^w must be"):
        adaptive_loss_scaling(nn.NdArray((1,)), wrong, ScaleTracker())


floats = st.floats(-1e6, 1e6, width=32)


@settings(max_examples=60, deadline=None)
@given(
    arrays(np.float32, 5, elements=floats),
    arrays(np.float32, 5, elements=floats),
    st.integers(-20, 20),
    st.sampled_from([np.float32, np.float16, np.float64]),
    st.booleans(),
)
def test_passes_gradients_as_float64_does(
    source: np.ndarray, target: np.ndarray, exponent: int, dtype: Any, accumulate: bool
) -> None:
    source, target = np.clip(source, -6e4, 6e4).astype(dtype), np.clip(target, -6e4, 6e4).astype(dtype)
    grad, into = nn.NdArray.from_numpy_array(source), nn.NdArray.from_numpy_array(target)
    IdentityFunction().pass_on(grad, into, 2.0**exponent, accumulate=accumulate)
    # A product may be subnormal, and is rounded before it is added.
    product = (source.astype(np.float32) * np.float32(2.0**exponent)).astype(np.float64)
    expected = product + target.astype(np.float64) if accumulate else source * np.float64(2.0**exponent)
    stored = np.float16 if dtype == np.float16 and not accumulate else np.float32
    assert into.dtype == stored
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(into.data, expected.astype(stored))


def test_a_lazily_zero_gradient_stays_so() -> None:
    zero, into = nn.NdArray((3,)), nn.NdArray((3,))
    zero.zero()
    f = IdentityFunction()
    f.pass_on(zero, into, 2.0, accumulate=False)
    assert zero.zeroing
    assert into.zeroing
    f.pass_on(nn.NdArray.from_numpy_array(np.ones(3, np.float32)), into, 2.0, accumulate=True)
    np.testing.assert_array_equal(into.data, [2, 2, 2])
    f.pass_on(zero, into, 2.0, accumulate=True)
    np.testing.assert_array_equal(into.data, [2, 2, 2])
    assert f.statistics(zero).zeros == 3
    assert zero.zeroing
