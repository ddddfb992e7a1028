# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import logging
from typing import Any, Optional, Tuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnabla_adaloss.core import (
    METHODS,
    AdaLoss,
    AdaLossConfig,
    ArrayStatistics,
    Needs,
    Reason,
    get_loss_scale,
    statistics_of,
)


class NumpyAdaLoss(AdaLoss):
    """Counts how often arrays are read."""

    def __init__(self, config: Optional[AdaLossConfig] = None) -> None:
        super().__init__(config)
        self.reads = 0

    def statistics(self, array: Any) -> ArrayStatistics:
        self.reads += 1
        return statistics_of(array)

    def to_numpy(self, array: Any) -> np.ndarray:
        self.reads += 1
        return array


def arrays(seed: int, exponent: int = -26) -> Tuple[np.ndarray, np.ndarray]:
    random = np.random.RandomState(seed)
    return random.standard_normal((3, 4)) * 2.0**exponent, random.standard_normal((4, 5)) * 0.1


G, W = arrays(0)


def call(
    ada_loss: AdaLoss,
    g: np.ndarray = G,
    weight: Optional[np.ndarray] = W,
    *,
    iteration: int = 0,
    previous_scale: float = 1.0,
    layer: str = "fc",
    **arguments: Any,
) -> float:
    return ada_loss.loss_scale(
        layer, g, weight, fan_in=4.0, previous_scale=previous_scale, iteration=iteration, **arguments
    )


def test_the_framework_part_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        AdaLoss(AdaLossConfig())


@given(
    st.sampled_from(sorted(METHODS)),
    st.integers(0, 1000),
    st.integers(-40, 20),
    st.integers(-3, 12).map(lambda k: 2.0**k),
    st.booleans(),
    st.booleans(),
)
def test_is_get_loss_scale(
    method: str, seed: int, exponent: int, previous_scale: float, power_of_two: bool, with_weight: bool
) -> None:
    config = AdaLossConfig(loss_scale_method=method, fixed_loss_scale=8.0, power_of_two=power_of_two)
    g, weight = arrays(seed, exponent)
    if not with_weight:
        weight = None
    alpha = call(
        NumpyAdaLoss(config), g, weight, previous_scale=previous_scale, g_statistics=statistics_of(g),
        weight_statistics=None if weight is None else statistics_of(weight),
    )  # fmt: skip
    assert type(alpha) is float
    assert alpha == pytest.approx(
        float(get_loss_scale(g, weight, config=config, fan_in=4.0, prev_scale=previous_scale)), rel=1e-6
    )


def test_given_statistics_spare_the_arrays() -> None:
    ada_loss = NumpyAdaLoss()
    given_both = call(ada_loss, g_statistics=statistics_of(G), weight_statistics=statistics_of(W))
    assert ada_loss.reads == 0
    assert call(NumpyAdaLoss()) == given_both > 1.0


def test_fixed_reads_nothing_and_is_guarded_by_what_is_given() -> None:
    ada_loss = NumpyAdaLoss(AdaLossConfig(loss_scale_method="fixed", fixed_loss_scale=8.0))
    assert not ada_loss.adaptive
    assert call(ada_loss) == 8.0
    assert ada_loss.reads == 0
    large = statistics_of(np.full((1, 4), 60000.0))
    ones = statistics_of(np.ones((4, 1)))
    assert call(ada_loss, g_statistics=large, weight_statistics=ones) == 0.25


def test_is_recomputed_every_n_iterations_not_calls() -> None:
    ada_loss = NumpyAdaLoss(AdaLossConfig(update_per_n_iteration=3, use_bound=False))
    small, tiny = arrays(0, -26)[0], arrays(0, -30)[0]
    first = call(ada_loss, small, iteration=5)
    for iteration in (5, 5, 6, 7, 7):
        assert call(ada_loss, tiny, iteration=iteration) == first
    assert call(ada_loss, tiny, iteration=8) == 16 * first
    assert ada_loss.reads == 4


def test_layers_are_apart() -> None:
    ada_loss = NumpyAdaLoss()
    a = call(ada_loss, arrays(0, -26)[0], layer="a")
    b = call(ada_loss, arrays(0, 10)[0], layer="b")
    assert ada_loss.layer_scales == {"a": a, "b": b}
    assert a > b == 1.0


def test_an_iteration_number_that_starts_again_recomputes() -> None:
    ada_loss = NumpyAdaLoss(AdaLossConfig(update_per_n_iteration=100))
    call(ada_loss, arrays(0, -26)[0], iteration=50)
    assert call(ada_loss, arrays(0, 10)[0], iteration=0) == 1.0


def test_bounds_apply_between_updates() -> None:
    ada_loss = NumpyAdaLoss(AdaLossConfig(update_per_n_iteration=10))
    assert call(ada_loss, iteration=0) == 16.0
    assert call(ada_loss, iteration=1, previous_scale=256.0) == 4.0
    assert call(ada_loss, iteration=2, previous_scale=8192.0) == 1.0


def test_the_guard_applies_between_updates() -> None:
    ada_loss = NumpyAdaLoss(AdaLossConfig(update_per_n_iteration=10))
    call(ada_loss, iteration=0)
    large = statistics_of(np.full((1, 4), 60000.0))
    guarded = call(
        ada_loss, iteration=1, g_statistics=large, weight_statistics=statistics_of(np.ones((4, 1)))
    )
    assert guarded == 0.25
    # Without statistics the last limit holds: it is one of S * alpha.
    assert call(ada_loss, iteration=2, previous_scale=0.25) == 1.0
    assert call(ada_loss, iteration=3, previous_scale=4.0) == 0.0625


def test_the_guard_counts_fan_in_bound() -> None:
    g, weight = np.full((1, 4), 8000.0), np.ones((4, 1))
    assert call(NumpyAdaLoss(), g, weight) == 1.0
    assert call(NumpyAdaLoss(), g, weight, fan_in_bound=9.0) == 0.5


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(
    "method", ["approx_range", "element_wise_range", lambda g, W, *, config, fan_in: 8.0]
)
def test_nonfinite_gives_one_and_is_not_kept(bad: float, method: Any) -> None:
    ada_loss = NumpyAdaLoss(AdaLossConfig(loss_scale_method=method, update_per_n_iteration=10))
    assert call(ada_loss, np.full((3, 4), bad), iteration=0) == 1.0
    assert call(ada_loss, G, iteration=1) > 1.0
    assert call(ada_loss, G, iteration=2, g_statistics=statistics_of(np.array([bad]))) == 1.0


@pytest.mark.parametrize("weight", [W, None])
def test_a_method_that_looks_at_arrays_gets_them_as_numpy_has_them(weight: Optional[np.ndarray]) -> None:
    seen = []

    def method(g: Any, W: Any, *, config: AdaLossConfig, fan_in: float) -> float:
        seen.append((g, W))
        return 2.0

    class Boxed(NumpyAdaLoss):
        def statistics(self, array: Any) -> ArrayStatistics:
            return statistics_of(array[0])

        def to_numpy(self, array: Any) -> np.ndarray:
            return array[0]

    ada_loss = Boxed(AdaLossConfig(loss_scale_method=method))
    assert not ada_loss.takes_statistics
    assert call(ada_loss, (G,), None if weight is None else (weight,)) == 2.0
    assert seen[0][0] is G
    assert seen[0][1] is weight


@pytest.mark.parametrize("method", sorted(METHODS))
def test_what_a_method_needs_is_known_before_it_is_asked(method: str) -> None:
    ada_loss = NumpyAdaLoss(AdaLossConfig(loss_scale_method=method))
    assert ada_loss.takes_statistics is (METHODS[method].needs is not Needs.ARRAYS)
    assert ada_loss.adaptive is (METHODS[method].needs is not Needs.NOTHING)


def test_the_accumulated_bound_does_not_count_the_lift() -> None:
    assert call(NumpyAdaLoss(), previous_scale=256.0) == 4.0
    assert call(NumpyAdaLoss(), previous_scale=256.0, lift=4.0) == 16.0


def test_recorder_gets_every_decision() -> None:
    records = []
    ada_loss = NumpyAdaLoss(AdaLossConfig(recorder=records.append))
    alpha = call(ada_loss, iteration=7, previous_scale=32.0)
    (record,) = records
    assert record.iteration == 7
    assert record.layer == "fc"
    assert (record.alpha, record.previous_scale, record.accumulated_scale) == (alpha, 32.0, 32.0 * alpha)
    assert record.unbounded > alpha
    assert record.fan_in == 4.0
    assert record.reason is Reason.SCALE_BOUND
    assert (record.g, record.weight) == (statistics_of(G), statistics_of(W))
    # What the method gave before does not stand in a record of a gradient that it was not asked about.
    call(ada_loss, np.full((3, 4), np.nan), iteration=8)
    assert (records[1].alpha, records[1].unbounded, records[1].reason) == (1.0, 1.0, Reason.NONFINITE)


def test_an_error_of_a_recorder_is_told_once_and_ends_no_training(caplog: pytest.LogCaptureFixture) -> None:
    seen = []

    def recorder(record: Any) -> None:
        seen.append(record)
        raise KeyError("full")

    ada_loss = NumpyAdaLoss(AdaLossConfig(recorder=recorder))
    with caplog.at_level(logging.ERROR, logger="nnabla_adaloss"):
        assert [call(ada_loss, iteration=i) for i in range(3)] == [16.0] * 3
    assert len(seen) == 3
    assert len(caplog.records) == 1
    assert caplog.records[0].getMessage() == "recorder raised an exception for layer fc; training goes on"
    assert "KeyError: 'full'" in caplog.text


@pytest.mark.parametrize(("level", "lines"), [(0, 0), (1, 2), (2, 2 + 6)])
def test_log(level: int, lines: int, caplog: pytest.LogCaptureFixture) -> None:
    ada_loss = NumpyAdaLoss(AdaLossConfig(debug_level=level))
    with caplog.at_level(logging.INFO, logger="nnabla_adaloss"):
        for iteration in range(3):
            call(ada_loss, iteration=iteration, layer="a")
            call(ada_loss, arrays(0, 10)[0], iteration=iteration, layer="b")
    assert len(caplog.records) == lines
    if level:
        summaries = [r.getMessage() for r in caplog.records if "layers" in r.getMessage()]
        assert summaries[0] == "iteration 0: 2 layers, scales from 1 to 16, largest accumulated scale 16"
    if level == 2:
        single = "layer b: scale 1 (unbounded 1), accumulated scale 1 -> 1, fan-in 4"
        assert caplog.records[1].getMessage() == f"iteration 0, {single}"


def test_the_log_sums_up_each_iteration_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    ada_loss = NumpyAdaLoss(AdaLossConfig(debug_level=1))
    large = arrays(0, 20)[0]
    with caplog.at_level(logging.INFO, logger="nnabla_adaloss"):
        for iteration, scale in enumerate((8.0, 2.0, 1.0)):
            call(ada_loss, large, iteration=iteration, previous_scale=scale)
    alpha = ada_loss.layer_scales["fc"]
    assert alpha < 0.125
    told = [record.getMessage() for record in caplog.records]
    for line, iteration, accumulated in zip(told, (0, 1), (alpha * 8.0, alpha * 2.0)):
        scales = f"scales from {alpha:g} to {alpha:g}, largest accumulated scale {accumulated:g}"
        assert line == f"iteration {iteration}: 1 layers, {scales}"
    assert len(told) == 2


def test_memory_does_not_grow_with_iterations() -> None:
    ada_loss = NumpyAdaLoss(AdaLossConfig(debug_level=1))
    for iteration in range(50):
        call(ada_loss, iteration=iteration)
    assert list(ada_loss.layer_scales) == ["fc"]


def test_a_useless_scale_of_ones_own_method_is_refused() -> None:
    config = AdaLossConfig(loss_scale_method=lambda g, W, *, config, fan_in: 0.0)
    with pytest.raises(ValueError, match="; a scale must be positive and finite$"):
        call(NumpyAdaLoss(config))


def test_a_copy_goes_on_from_the_state_of_the_original() -> None:
    config = AdaLossConfig(update_per_n_iteration=10)
    original, copy = NumpyAdaLoss(config), NumpyAdaLoss(config)
    call(original, layer="a")
    call(original, arrays(0, 10)[0], layer="b")
    state = json.loads(json.dumps(original.state_dict()))
    copy.load_state_dict(state)
    assert copy.state_dict() == original.state_dict() == state
    assert copy.layer_scales == {"a": 16.0, "b": 1.0}
    # It is not asked anew.
    assert call(copy, arrays(0, 10)[0], layer="a", iteration=1) == 16.0
    copy.forget()
    assert copy.layer_scales == {}
    assert call(copy, arrays(0, 10)[0], layer="a", iteration=1) == 1.0


def test_a_state_that_cannot_be_loaded_changes_nothing() -> None:
    ada_loss = NumpyAdaLoss()
    call(ada_loss)
    before = ada_loss.state_dict()
    with pytest.raises(ValueError, match="must be"):
        ada_loss.load_state_dict({"layers": {"fc": before["layers"]["fc"], "b": [0, 0.0, 1.0, 1.0]}})
    assert ada_loss.state_dict() == before
