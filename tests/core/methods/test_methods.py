# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nnabla_adaloss import (
    AdaLossConfig,
    HistoryPolicy,
    Method,
    Needs,
    Range,
    get_loss_scale_by_abs_range,
    get_loss_scale_by_approx_range,
    get_loss_scale_by_element_wise_range,
)
from nnabla_adaloss.core.methods import (
    METHODS,
    AmaxHistory,
    ApproxRange,
    ElementWiseRange,
    Fixed,
    LognormalRange,
    overflow_limit,
    resolve_method,
)
from nnabla_adaloss.core.statistics import statistics_of

RANGE = Range(6e-8, 65504.0)


def test_built_in_names() -> None:
    assert set(METHODS) == {"approx_range", "amax_history", "abs_range", "element_wise_range", "fixed"}
    assert all(type(resolve_method(name)) is method for name, method in METHODS.items())


def constant(g: Any, W: Any, *, config: AdaLossConfig, fan_in: float) -> float:
    return 4.0


def test_a_function_is_found_by_name() -> None:
    method = resolve_method(f"{__name__}:constant")
    assert method.function is constant
    assert method.needs is Needs.ARRAYS


def test_a_callable_is_taken_as_it_is() -> None:
    # Some of what is written in C does not tell which arguments it takes.
    for function in (math.hypot, lambda *arrays, **more: 1.0):
        assert resolve_method(function).function is function


@pytest.mark.parametrize("name", ["", "approx", "math.fsum", "math:fsun", "no_module:f", ":", "a b:c"])
def test_unknown_names(name: str) -> None:
    with pytest.raises(ValueError, match=f"loss_scale_method='{name}'"):
        resolve_method(name)


@dataclass(frozen=True)
class OfAUser(Method):
    needs = Needs.STATISTICS
    n_uf_threshold: float = 0.5
    margin: float = 2.0

    def scale(self, g: Any, W: Any, *, range: Range, fan_in: float) -> float:
        return range.u_max / (self.margin * g.abs_max)


def test_a_method_takes_its_parameters_from_the_configuration() -> None:
    config = AdaLossConfig(loss_scale_method=f"{__name__}:OfAUser", n_uf_threshold=0.25)
    assert config.method == AdaLossConfig(loss_scale_method=OfAUser, n_uf_threshold=0.25).method
    assert config.method == OfAUser(n_uf_threshold=0.25, margin=2.0)


def test_a_method_as_a_value_keeps_its_parameters() -> None:
    method = OfAUser(margin=4.0)
    assert AdaLossConfig(loss_scale_method=method, n_uf_threshold=0.25).method is method


def test_a_function_is_given_the_configuration() -> None:
    def method(g: Any, W: Any, *, config: AdaLossConfig, fan_in: float) -> float:
        return config.fixed_loss_scale * g.max() * fan_in

    config = AdaLossConfig(loss_scale_method=method, fixed_loss_scale=3.0)
    assert config.method.scale(np.ones(2), None, range=RANGE, fan_in=2.0) == 6.0


@pytest.mark.parametrize(
    ("method", "name", "values"),
    [
        (Fixed, "fixed_loss_scale", ("1", 0.0)),
        (ElementWiseRange, "max_rescue_ratio", ("1", 0.0)),
        (ApproxRange, "n_uf_threshold", ("1", 0.0, 1.0, math.nan)),
        (LognormalRange, "n_uf_threshold", ("1", 0.0, 1.0, math.nan)),
        (AmaxHistory, "margin", ("1", 0.0, math.nan)),
        (AmaxHistory, "window", (1.5, 0)),
    ],
)
def test_parameters_out_of_range_are_named(method: Any, name: str, values: Any) -> None:
    for value in values:
        with pytest.raises((TypeError, ValueError), match=f"^{name}={value!r}"):
            method(**{name: value})


def test_a_measuring_method_takes_its_settings_as_a_value_or_leaves_them() -> None:
    method = AdaLossConfig(loss_scale_method="amax_history").method
    assert method == AmaxHistory()
    chosen = HistoryPolicy(margin=8.0, window=32)
    assert method.policy(chosen) == chosen
    assert AmaxHistory(margin=2.0).policy(chosen) == HistoryPolicy(margin=2.0, window=32)
    assert method.needs is Needs.COMPONENTS
    assert method.scale(None, None, range=RANGE, fan_in=4.0) == 1.0
    given = AmaxHistory(margin=16.0, window=8)
    assert AdaLossConfig(loss_scale_method=given).method is given


def test_the_limit_is_reached_when_all_products_are_the_largest() -> None:
    g, W = statistics_of(np.full((2, 3), -2.0)), statistics_of(np.full((3, 1), 0.5))
    assert overflow_limit(g, W, 3.0, 600.0) == 200.0
    assert overflow_limit(g, None, 3.0, 600.0) == 300.0


@pytest.mark.parametrize("method", [LognormalRange(), ElementWiseRange(), ElementWiseRange(0.5)])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_infinities_and_nans_do_not_count(method: Method, dtype: Any) -> None:
    g = np.array([[1e-5, -2e-3], [0.0, 3e-4]], dtype)
    with_others = np.concatenate([g, [[np.inf, -np.inf], [np.nan, np.inf]]]).astype(dtype)
    of = partial(method.scale, W=None, range=Range(1e-2, 65504.0), fan_in=1.0)
    assert of(with_others) == of(g) > 1.0


@pytest.mark.parametrize("zero", [np.zeros(3), np.zeros(0)])
def test_no_limit_for_zeros(zero: np.ndarray) -> None:
    ones = statistics_of(np.ones(3))
    assert overflow_limit(statistics_of(zero), ones, 3.0, 1.0) == math.inf
    assert overflow_limit(ones, statistics_of(zero), 3.0, 1.0) == math.inf


# ---- what holds for all published formulas

LOGNORMAL = partial(get_loss_scale_by_approx_range, lognormal=True)
FORMULAS = get_loss_scale_by_abs_range, get_loss_scale_by_approx_range, get_loss_scale_by_element_wise_range


@pytest.mark.parametrize("useless", [np.zeros((3, 2)), np.zeros((0, 2)), [[math.nan, 1]], [[math.inf, 1]]])
def test_useless_arrays_give_one(useless: Any) -> None:
    g, ones, config = np.asarray(useless), np.full((2, 2), 1e-8), AdaLossConfig()
    for formula in FORMULAS:
        assert formula(g, ones, config=config, fan_in=2) == formula(ones, g.T, config=config, fan_in=2) == 1.0
    assert {float(formula(g, config=config)) for formula in (LOGNORMAL, *FORMULAS)} == {1.0}


@example(5e-324, 1e308)
@example(1e308, 1e308)
@example(1e200, -1e200)
@example(5e-324, 5e-324)
@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(allow_nan=False, allow_infinity=False))
def test_scales_are_never_zero_nor_infinite(one: float, other: float) -> None:
    g, config = np.array([[one, other]]), AdaLossConfig()
    with np.errstate(all="raise"):  # none of numpy's complaints is for the user
        found = [f(g, W, config=config, fan_in=2) for f in FORMULAS for W in (g.T, g[:, ::-1].T)]
        found += [f(g, config=config) for f in FORMULAS]
    assert all(0.0 < scale < math.inf for scale in found)
