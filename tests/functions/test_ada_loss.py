# SPDX-License-Identifier: Apache-2.0
"""A layer's scale by itself: each reason, what wins over what, what is remembered and what is reported."""

from __future__ import annotations

import json
import logging
import math
from typing import Any, List, Optional, Tuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnabla_adaloss import (
    AdaLoss,
    AdaLossConfig,
    ArrayStatistics,
    LayerRecord,
    LayerRow,
    LogMonitor,
    Method,
    Needs,
    Reason,
    Recorder,
    get_loss_scale,
)
from nnabla_adaloss.core.methods import METHODS
from nnabla_adaloss.core.statistics import statistics_of
from nnabla_adaloss.functions.ada_loss import LayerState
from tests.worlds.monitors import Records


class NumpyAdaLoss(AdaLoss):
    """Counts how often arrays are read, and keeps what is reported."""

    def __init__(self, method: Any = None, monitor: Any = None, **settings: Any) -> None:
        self.reads = 0
        monitor = monitor or Records()
        self.records: List[LayerRecord] = getattr(monitor, "records", [])
        super().__init__(AdaLossConfig(method, **settings), [monitor])

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
SMALL, LARGE, ONES = np.full((1, 4), 1e-9), np.full((1, 4), 60000.0), np.ones((4, 1))


def call(
    ada_loss: AdaLoss,
    g: Any = G,
    weight: Any = W,
    *,
    iteration: int = 0,
    previous_scale: float = 1.0,
    layer: str = "fc",
    **arguments: Any,
) -> float:
    return ada_loss.loss_scale(
        layer, g, weight, fan_in=4.0, previous_scale=previous_scale, iteration=iteration, **arguments
    )


def measured(ada_loss: AdaLoss, g: np.ndarray, weight: Optional[np.ndarray], **arguments: Any) -> float:
    """`call` with the statistics of both."""
    known = None if weight is None else statistics_of(weight)
    return call(ada_loss, g, weight, g_statistics=statistics_of(g), weight_statistics=known, **arguments)


def decided(
    scale: float, g: np.ndarray = SMALL, weight: np.ndarray = W, *, use_bound: bool = False, **arguments: Any
) -> Tuple[float, Reason]:
    """Alpha of a fixed scale, and what decided about it."""
    ada_loss = NumpyAdaLoss("fixed", fixed_loss_scale=scale, use_bound=use_bound)
    alpha = measured(ada_loss, g, weight, **arguments)
    return alpha, ada_loss.records[-1].reason


def test_deciding_settings() -> None:
    assert decided(64.0) == decided(100.0) == (64.0, Reason.METHOD)
    assert decided(64.0, use_bound=True) == (16.0, Reason.SCALE_BOUND)
    assert decided(64.0, use_bound=True, previous_scale=256.0) == (4.0, Reason.ACCUMULATED_BOUND)
    assert decided(64.0, LARGE / 8, ONES) == (2.0, Reason.OVERFLOW_GUARD)
    # The limit is that of the gradient as it arrives, whatever scale it carries.
    assert decided(64.0, LARGE / 8, ONES, previous_scale=8.0) == (2.0, Reason.OVERFLOW_GUARD)
    assert decided(64.0, LARGE / 8, ONES, fan_in_bound=36.0) == (0.125, Reason.OVERFLOW_GUARD)


def test_the_scaled_weight_stays_in_range() -> None:
    weight = np.full((4, 1), 3000.0)
    assert decided(64.0, weight=weight) == (64.0, Reason.METHOD)
    assert decided(64.0, weight=weight, weight_max=65504.0) == (16.0, Reason.WEIGHT_RANGE)
    assert decided(64.0, weight=weight, weight_max=100.0) == (1.0, Reason.WEIGHT_RANGE)
    # What reaches the end of the range is in it.
    assert decided(64.0, weight=weight, weight_max=64.0 * 3000.0) == (64.0, Reason.METHOD)
    assert decided(2.0, weight=weight, weight_max=3000.0) == (1.0, Reason.WEIGHT_RANGE)
    # A weight that is beyond the range by itself is not the scale's fault.
    assert decided(1.0, weight=weight, weight_max=100.0) == (1.0, Reason.METHOD)


@given(
    st.sampled_from(sorted(METHODS)),
    st.integers(0, 1000),
    st.tuples(st.integers(-40, 20), st.integers(-10, 10)),
    st.integers(-3, 20).map(lambda k: 2.0**k),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_it_is_get_loss_scale_and_nothing_overflows(
    method: str,
    seed: int,
    exponents: Tuple[int, int],
    previous_scale: float,
    options: Tuple[bool, bool, bool],
) -> None:
    power_of_two, use_bound, with_weight = options
    g, weight = arrays(seed, exponents[0])
    weight = weight * 2.0 ** exponents[1] if with_weight else None
    ada_loss = NumpyAdaLoss(method, fixed_loss_scale=64.0, power_of_two=power_of_two, use_bound=use_bound)
    alpha = measured(ada_loss, g, weight, previous_scale=previous_scale)
    assert type(alpha) is float
    config = ada_loss.config
    assert alpha == get_loss_scale(g, weight, config=config, fan_in=4.0, prev_scale=previous_scale)
    assert len(ada_loss.records) == 1
    assert ada_loss.layer_scales == {"fc": alpha}
    largest = np.abs(g).max() * (1.0 if weight is None else 4.0 * np.abs(weight).max())
    assert alpha * largest <= 65504.0 * (1.0 + 1e-12)
    assert not power_of_two or math.frexp(alpha)[0] == 0.5
    assert not use_bound or alpha <= max(1.0, min(16.0, 1024.0 / previous_scale))
    in_range = measured(ada_loss, g, weight, previous_scale=previous_scale, weight_max=8.0)
    assert weight is None or in_range <= 1.0 or in_range * np.abs(weight).max() <= 8.0


def test_given_statistics_spare_the_arrays_and_fixed_reads_none() -> None:
    ada_loss, fixed = NumpyAdaLoss(), NumpyAdaLoss("fixed", fixed_loss_scale=8.0)
    assert measured(ada_loss, G, W) == call(NumpyAdaLoss()) > 1.0
    assert call(fixed) == 8.0
    assert ada_loss.reads == fixed.reads == 0


def test_is_recomputed_every_n_iterations_not_calls() -> None:
    ada_loss = NumpyAdaLoss(update_per_n_iteration=3, use_bound=False)
    small, tiny = arrays(0, -26)[0], arrays(0, -30)[0]
    first = call(ada_loss, small, iteration=5)
    for iteration in (5, 5, 6, 7, 7):
        assert call(ada_loss, tiny, iteration=iteration) == first
    assert call(ada_loss, tiny, iteration=8) == 16 * first
    assert ada_loss.reads == 4
    # Also when iterations are counted anew.
    assert call(ada_loss, arrays(0, 10)[0], iteration=0) == 1.0


def test_bounds_and_guard_apply_between_updates() -> None:
    ada_loss = NumpyAdaLoss(update_per_n_iteration=10)
    assert call(ada_loss, iteration=0) == 16.0
    assert call(ada_loss, iteration=1, previous_scale=256.0) == 4.0
    assert call(ada_loss, iteration=2, previous_scale=8192.0) == 1.0
    assert measured(ada_loss, LARGE, ONES, iteration=3) == 0.25
    # Without statistics of both the last limit holds: it is one of S * alpha.
    assert call(ada_loss, iteration=4, previous_scale=0.25) == 1.0
    assert call(ada_loss, iteration=5, previous_scale=4.0, g_statistics=statistics_of(SMALL)) == 0.0625
    assert call(ada_loss, SMALL, None, iteration=6, g_statistics=statistics_of(SMALL)) == 16.0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(
    "method", ["approx_range", "element_wise_range", lambda g, W, *, config, fan_in: 8.0]
)
def test_nonfinite_gives_one_and_is_not_kept(bad: float, method: Any) -> None:
    ada_loss = NumpyAdaLoss(method, update_per_n_iteration=10)
    assert call(ada_loss, np.full((3, 4), bad), iteration=0) == 1.0
    assert call(ada_loss, G, W * bad, iteration=0) == 1.0
    assert call(ada_loss, G, iteration=1) > 1.0
    before = ada_loss.state_dict()["layers"]["fc"]
    assert call(ada_loss, G, iteration=2, g_statistics=statistics_of(np.array([bad]))) == 1.0
    assert ada_loss.state_dict()["layers"]["fc"] == [*before[:3], 1.0, []]
    # What the method gave before does not stand in a record of a gradient that it was not asked about.
    last = ada_loss.records[-1]
    assert (last.alpha, last.unbounded, last.reason) == (1.0, 1.0, Reason.NONFINITE)


def test_statistics_of_nothing_are_not_remembered() -> None:
    ada_loss = NumpyAdaLoss(update_per_n_iteration=10)
    assert call(ada_loss, np.zeros((0, 4))) == 1.0
    assert ada_loss.records[-1].reason is Reason.METHOD
    assert call(ada_loss, iteration=1) == 16.0


@pytest.mark.parametrize("weight", [W, None])
def test_a_method_that_looks_at_arrays_gets_them_as_numpy_has_them(weight: Optional[np.ndarray]) -> None:
    seen = []

    def method(g: Any, W: Any, *, config: AdaLossConfig, fan_in: float) -> np.float32:
        seen.append((g, W))
        return np.float32(9.0)

    class Boxed(NumpyAdaLoss):
        def statistics(self, array: Any) -> ArrayStatistics:
            return statistics_of(array[0])

        def to_numpy(self, array: Any) -> np.ndarray:
            return array[0]

    assert call(Boxed(method), (G,), None if weight is None else (weight,)) == 8.0
    assert get_loss_scale(G, weight, config=AdaLossConfig(method), fan_in=4.0) == 8.0
    assert all(g is G and W is weight for g, W in seen)


def test_a_method_with_a_history() -> None:
    seen: List[List[float]] = []

    class LargestOfWindow(Method):
        """What would have kept the largest gradient of the last three iterations at 1."""

        needs = Needs.HISTORY
        window = 3

        def scale(self, g: Any, W: Any, *, range: Any, fan_in: float) -> float:
            seen.append([statistics.abs_max for statistics in g])
            return 1.0 / max(seen[-1])

    ada_loss, alphas = NumpyAdaLoss(LargestOfWindow, use_bound=False), []
    for iteration, (magnitude, S) in enumerate(
        [(2.0, 1.0), (0.5, 1.0), (0.25, 4.0), (0.25, 1.0), (0.25, 1.0)]
    ):
        for _ in range(2):  # the passes of one iteration share an answer
            alpha = call(ada_loss, np.array([magnitude * S]), SMALL, iteration=iteration, previous_scale=S)
        alphas.append(alpha * S)
        state = json.loads(json.dumps(ada_loss.state_dict()))
        ada_loss = NumpyAdaLoss(LargestOfWindow, use_bound=False)
        ada_loss.load_state_dict(state)
        assert ada_loss.state_dict() == state
    assert alphas == [0.5, 0.5, 0.5, 2.0, 4.0]
    # All carry the scale of the present iteration.
    assert seen == [[2.0], [2.0, 0.5], [8.0, 2.0, 1.0], [0.5, 0.25, 0.25], [0.25, 0.25, 0.25]]


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *(("previous_scale", bad) for bad in (0.0, -8.0, math.nan, math.inf, "8")),
        *((name, bad) for name in ("fan_in", "fan_in_bound") for bad in (-1.0, math.nan, math.inf)),
        ("iteration", 1.5),
    ],
)
def test_numbers_that_no_layer_has_are_refused(name: str, bad: Any) -> None:
    ada_loss = NumpyAdaLoss()
    with pytest.raises((TypeError, ValueError), match=f"^{name}="):
        ada_loss.loss_scale("fc", G, W, **{"fan_in": 4.0, "previous_scale": 1.0, "iteration": 0, name: bad})
    assert ada_loss.layer_scales == {}


def test_monitors_receive_every_decision() -> None:
    ada_loss = NumpyAdaLoss()
    alpha = call(ada_loss, iteration=7, previous_scale=32.0)
    (record,) = ada_loss.records
    assert record.unbounded > alpha == 16.0
    assert record == LayerRecord(
        iteration=7,
        layer="fc",
        alpha=16.0,
        unbounded=record.unbounded,
        previous_scale=32.0,
        accumulated_scale=512.0,
        fan_in=4.0,
        g=statistics_of(G),
        weight=statistics_of(W),
        reason=Reason.SCALE_BOUND,
    )


def test_recorder_and_log_monitor_of_layers_scaled_by_hand(caplog: pytest.LogCaptureFixture) -> None:
    recorder, log = Recorder(), LogMonitor(1)
    for monitor in (recorder, log):
        ada_loss = NumpyAdaLoss(monitor=monitor)
        with caplog.at_level(logging.INFO, logger="nnabla_adaloss"):
            assert [call(ada_loss, iteration=i) for i in range(2)] == [16.0] * 2
    assert [(row.layer, row.alpha, row.elements) for row in recorder.recording.of(LayerRow)] == [
        ("fc", 16.0, None)
    ] * 2
    assert caplog.messages == ["iteration 0: 1 layers, scales from 16 to 16, largest accumulated scale 16"]


def test_a_copy_goes_on_from_the_state_of_the_original() -> None:
    original, copy = (NumpyAdaLoss(update_per_n_iteration=10) for _ in range(2))
    call(original, layer="a")
    call(original, arrays(0, 10)[0], layer="b")
    state = json.loads(json.dumps(original.state_dict()))
    copy.load_state_dict(state)
    assert copy.state_dict() == original.state_dict() == state
    assert copy.layer_scales == {"a": 16.0, "b": 1.0}
    # It is not asked anew.
    assert call(copy, arrays(0, 10)[0], layer="a", iteration=1) == 16.0
    with pytest.raises(ValueError, match="must be"):
        copy.load_state_dict({"layers": {"a": state["layers"]["b"], "b": [0, 0.0, 1.0, 1.0, []]}})
    with pytest.raises(TypeError, match="^layers must be a dict"):
        copy.load_state_dict({"layers": []})
    assert copy.layer_scales == {"a": 16.0, "b": 1.0}
    copy.forget()
    assert copy.layer_scales == {}
    assert call(copy, arrays(0, 10)[0], layer="a", iteration=1) == 1.0


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ([0.5, 1.0, math.inf, 1.0, []], "computed_at=0.5"),
        ([-1, 0.0, math.inf, 1.0, []], "unbounded=0.0"),
        ([0, 1.0, 0.0, 1.0, []], "accumulated_limit=0.0 must be positive"),
        ([0, 1.0, "all", 1.0, []], "accumulated_limit='all'"),
        ([0, 1.0, 1.0, math.nan, []], "alpha=nan"),
        ([0, 1.0, 1.0, 1.0, [["much"]]], r"statistics \['much'\] cannot be those of an array"),
        ([0, 1.0, 1.0, 1.0, [["much"] * 7]], "sum='much' must be a number"),
    ],
)
def test_states_that_came_from_no_layer_are_refused(values: List[Any], named: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{named}"):
        LayerState.from_list(values)
