# SPDX-License-Identifier: Apache-2.0
"""A batch that is run again is not lost, and nothing of it counts twice; what is lost is counted."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from typing import Any, Dict, List

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnabla_adaloss import AdaLossConfig, Counters, LossScaleError, LossScaleWarning
from tests.worlds.monitors import Records
from tests.worlds.networks import two_layers
from tests.worlds.tampering import Gate
from tests.worlds.trainings import AS_THE_BASELINE, METHODS, training, updater_of, updater_on
from tests.worlds.values import Values, assert_equal, data, snapshot


class Passes(Gate):
    """Counts how often forward runs; also in a parameter, where it is given one."""

    forwards = 0

    def forward_impl(self, inputs: Any, outputs: Any) -> None:
        super().forward_impl(inputs, outputs)
        self.forwards += 1
        for counter in inputs[1:]:
            counter.data.data[...] += 1.0


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("accum_grad", [1, 3])
def test_counters_in_forward_count_once(accum_grad: int, own: bool) -> None:
    """By a function of nnabla's, or one of the user's own: the first batch runs again before it is known."""
    counter = nn.parameter.get_parameter_or_create("counter", (1,), np.zeros(1), need_grad=False)
    loss = two_layers(data(8, 8))
    loss = Passes()(loss, counter) if own else loss + F.sum(F.assign(counter, counter + 1.0)) * 0.0
    updater = updater_of(loss, accum_grad=accum_grad)
    assert updater.update().retries == 1
    assert float(counter.d[0]) == accum_grad
    updater.update()
    assert float(counter.d[0]) == 2 * accum_grad


@pytest.mark.parametrize("options", [{}, {"global_scale": "dynamic", "scale": 2.0**13}])
def test_an_overflow_that_lower_scales_end_runs_forward_once_a_pass(options: Dict[str, Any]) -> None:
    passes = Passes()
    h = passes(F.tanh(PF.affine(data(8, 8), 8, name="a")))
    updater = updater_of(F.mean(PF.affine(h, 8, name="b") ** 2), solver=S.Sgd(0.01), **options)
    for _ in range(3):
        updater.update()
    before, passes.factor = passes.forwards, 2.0**10
    results = [updater.update() for _ in range(2)]
    assert 1 < results[0].retries < 4
    assert all(result.updated for result in results)
    assert passes.forwards - before == len(results) + sum(result.retries for result in results)


def test_a_fault_in_forward_that_nothing_shows_is_named_after_a_few_passes() -> None:
    """NaN behind a ReLU, in fp32: the loss is finite, and nobody has looked at other values."""
    passes, x = Passes(), data(8, 8)
    h = passes(F.relu(PF.affine(x, 8, name="a")))
    # Nothing but S0 is lowered before that is found out.
    options = {"storage": None, "global_scale": "dynamic", "config": AdaLossConfig(loss_scale_method="fixed")}
    loss = F.mean(PF.affine(h, 8, name="b") ** 2)
    updater = updater_of(loss, on_nonfinite_forward="skip", **options)
    updater.update()
    state, before = updater.scale_state, passes.forwards
    x.d[0] = np.nan
    result = updater.update()
    assert (result.updated, result.reason) == (False, "nonfinite_forward")
    assert "a/affine (Affine) reads an input of shape (8, 8) that holds 8" in result.cause
    assert passes.forwards - before < 7
    assert updater.scale_state == state


class Deep:
    """A deep network whose gradients are multiplied by batch, or from now on with the key -1; its updater."""

    def __init__(self, method: str = "approx_range", delay: int = 0, depth: int = 24, **options: Any) -> None:
        self.factors: Dict[int, float] = {}
        self.batches = 0
        x, grown, rng = nn.Variable((8, 8)), Gate(), np.random.RandomState(0)
        h = x
        for index in range(depth):
            h = F.tanh(PF.affine(h, 8, name=f"layer{index}", rng=rng))

        def feed() -> None:
            x.d = np.random.RandomState(self.batches).randn(*x.shape)
            grown.factor = self.factors.get(self.batches, self.factors.get(-1, 1.0))
            self.batches += 1

        loss = F.mean(grown(h) ** 2)
        config = AdaLossConfig(loss_scale_method=method, delay=delay)
        self.updater = updater_of(loss, feed, solver=S.Sgd(0.01), config=config, **options)
        assert all(result.updated for result in self.train(3))

    def train(self, updates: int) -> List[Any]:
        return [self.updater.update() for _ in range(updates)]


every_way = pytest.mark.parametrize(
    ("method", "delay"), [(method, delay) for method in METHODS for delay in (0, 1)]
)


@every_way
@pytest.mark.parametrize(("jump", "repeats"), [(16.0, 3), (2.0**16, 7)])
def test_repeats_grow_with_a_jump_and_not_with_the_depth(
    jump: float, repeats: int, method: str, delay: int
) -> None:
    deep = Deep(method, delay)
    deep.factors[3] = jump
    result = deep.updater.update()
    assert result.updated
    assert 0 < result.retries <= repeats
    assert deep.batches == 4
    # With delay=0 the next batch is measured again.
    assert [result.retries for result in deep.train(3)] == [int(not delay), 0, 0]


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_batch_that_was_repeated_as_often_as_allowed_is_lost(policy: str) -> None:
    deep = Deep(max_retries=1, on_scale_floor=policy)
    deep.factors[3] = 2.0**20
    if policy == "raise":
        with pytest.raises(LossScaleError, match="overflowed 2 times in iteration 4, with ever lower scales"):
            deep.updater.update()
    else:
        assert deep.updater.update()[0:4:3] == (False, "overflow")
    assert deep.batches == 4
    assert deep.updater.counters.lost == {"retries": 1}
    assert deep.updater.update().updated


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_scales_that_repeats_have_lowered_serve_the_batches_after_a_lost_one(policy: str) -> None:
    deep = Deep(max_retries=1, on_scale_floor=policy)
    deep.factors[-1] = 2.0**20

    def updated() -> bool:
        try:
            return bool(deep.updater.update().updated)
        except LossScaleError:
            return False

    assert [updated() for _ in range(4)] == [False, False, True, True]


def test_a_global_scale_that_was_lowered_in_vain_is_as_before_the_error() -> None:
    ones = AdaLossConfig(loss_scale_method="fixed")
    train = training(factors={1: 2.0**40})
    updater = updater_on(train, config=ones, global_scale="dynamic", max_retries=1)
    updater.update()
    with pytest.raises(LossScaleError, match="overflowed 2 times"):
        updater.update()
    assert updater.scale == 8.0


@pytest.mark.parametrize(("jump", "lost"), [(2.0**10, 4), (2.0**20, 6)])
@pytest.mark.parametrize("depth", [3, 24])
def test_lost_batches_grow_with_a_jump_and_not_with_the_depth(depth: int, jump: float, lost: int) -> None:
    deep = Deep(depth=depth, on_overflow="next", max_retries=0)
    deep.updater.solver.set_learning_rate(0.0)
    deep.factors[-1] = jump
    updated = [result.updated for result in deep.train(20)]
    assert 1 <= updated.count(False) <= lost
    assert all(updated[lost:])


@every_way
@pytest.mark.parametrize(("on_overflow", "accum_grad"), [("repeat", 1), ("next", 1), ("next", 2)])
def test_a_jump_for_good_costs_no_more_than_its_first_batch(
    method: str, delay: int, on_overflow: str, accum_grad: int
) -> None:
    deep = Deep(method, delay, depth=3, on_overflow=on_overflow, accum_grad=accum_grad)
    deep.factors[-1] = 2.0**10
    results = deep.train(30)
    assert all(r.updated for r in results)
    assert results[0].overflow_layers
    # Statistics of earlier iterations may cost one more, or spread the same number over two iterations.
    assert not any(r.overflow_layers for r in results[1 + delay :])
    # With delay=0 each batch is measured in one of eight iterations.
    measured = 0 if delay else accum_grad * 4
    assert sum(r.retries for r in results[1:]) <= 1 + delay + measured
    assert sum(r.retries for r in results) <= 5 + measured
    assert results[-1].scale <= 128.0


@every_way
def test_a_graph_for_each_batch_of_an_iteration(method: str, delay: int) -> None:
    """What was measured goes by name. Batches of one iteration are one entry, and each has its own number."""
    rng = np.random.RandomState(0)
    monitor = Records()
    records = monitor.records

    def build() -> nn.Variable:
        return two_layers(nn.Variable.from_numpy_array(rng.randn(64, 8).astype(np.float32)), 8, 8)

    def feed() -> None:
        updater.loss = build()

    config = AdaLossConfig(loss_scale_method=method, delay=delay, measure_every=1)
    updater = updater_of(build(), feed, solver=S.Sgd(0.01), accum_grad=3, config=config, monitors=[monitor])
    # With delay=0 each batch is measured, and runs again.
    assert [updater.update().retries for _ in range(4)] == ([1, 0, 0, 0] if delay else [3] * 4)
    windows = updater.scaling.components.next_memory().state_dict()["windows"]
    assert {pushed for pushed, _ in windows.values()} == {4}
    assert len({(r.iteration, r.attempt, r.layer) for r in records}) == len(records)


def with_factors(iterations: int, factors: Dict[int, float], **options: Any) -> Any:
    updater = updater_on(training(factors=factors), **options)
    assert all(updater.update().updated for _ in range(iterations))
    return updater


IN_FP32 = {
    "storage": None,
    "global_scale": "dynamic",
    "scale": 1.0,
    "config": AdaLossConfig(loss_scale_method="fixed", dtype="float32"),
}


@cache
def in_fp32(accum_grad: int, large: int) -> Values:
    """The parameters after five iterations in which one batch has large gradients."""
    with_factors(5, {large: 2.0**6}, accum_grad=accum_grad, **IN_FP32)
    return snapshot()


@pytest.mark.parametrize("global_scale", ["history", "dynamic"])
@pytest.mark.parametrize(("method", "delay"), [("approx_range", 0), ("approx_range", 1), ("amax_history", 1)])
@pytest.mark.parametrize(("accum_grad", "large"), [(1, 4), (3, 9), (3, 10), (3, 11)])
def test_an_overflow_in_any_batch_loses_nothing(
    accum_grad: int, large: int, method: str, delay: int, global_scale: str
) -> None:
    """Running statistics of batch normalization are those of each batch once, and gradients too."""
    exact = in_fp32(accum_grad, large)
    options: Dict[str, Any] = {
        "global_scale": global_scale,
        "scale": 2.0**13 if global_scale == "dynamic" else 8.0,
    }
    options["config"] = AdaLossConfig(loss_scale_method=method, delay=delay)
    updater = with_factors(5, {large: 2.0**6}, accum_grad=accum_grad, **options)
    assert updater.counters.batches == 5 * accum_grad
    assert updater.counters.repeats > 1
    found = snapshot()
    for name, array in exact.items():
        atol = 0.02 * np.abs(array).max() + 2e-3
        np.testing.assert_allclose(found[name], array, rtol=0.02, atol=atol, err_msg=name)


@every_way
def test_a_batch_that_no_scale_helps_is_thrown_away_alone(method: str, delay: int) -> None:
    updater = updater_on(training(overflow=[3]), config=AdaLossConfig(loss_scale_method=method, delay=delay))
    for _ in range(3):
        updater.update()
    before = updater.scaling.components.next_memory().state_dict(), updater.scale_state
    updater.solver.set_learning_rate(0.0)
    with pytest.warns(LossScaleWarning, match="not finite at any loss scale"):
        result = updater.update()
    assert result.updated
    assert updater.counters.batches == 5
    assert updater.scale_state == before[1]
    pushed = {name: values[0] for name, values in before[0]["windows"].items()}
    now = updater.scaling.components.next_memory().state_dict()["windows"]
    # With delay=1 an entry takes as many iterations as there are shares.
    assert {name: values[0] - (not delay) for name, values in now.items()} == pushed
    assert updater.update().retries == 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")
def test_scales_and_weights_are_as_before_after_too_many_overflows(method: str) -> None:
    config = AdaLossConfig(loss_scale_method=method, delay=0)
    updater = updater_on(training(overflow=range(3, 28)), config=config)
    for _ in range(3):
        updater.update()
    state, weights = updater.state_dict(), snapshot()
    with pytest.raises(LossScaleError, match="iteration 4 at the smallest loss scale"):
        updater.update()
    assert updater.counters.batches == 28
    after = updater.state_dict()
    assert after["scaling"]["components"] == state["scaling"]["components"]
    assert after["scale_state"] == state["scale_state"]
    assert_equal(snapshot(), weights)
    assert updater.update().updated


def test_hopeless_batches_end_with_the_retries_that_are_allowed() -> None:
    updater = updater_on(training(overflow=range(9)), max_retries=5)
    with (
        pytest.warns(LossScaleWarning, match="it is thrown away"),
        pytest.raises(LossScaleError, match="iteration 1 at the smallest loss scale"),
    ):
        updater.update()
    assert updater.counters.lost == {"hopeless": 6}
    # Three before the smallest scale is tried for the first; none for those after it.
    assert updater.counters.repeats == 3


numbers = st.lists(st.integers(0, 7), max_size=3, unique=True)


@pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")
@settings(max_examples=8, deadline=None)
@given(
    overflow=numbers,
    nan=numbers,
    accum_grad=st.integers(1, 2),
    way=st.sampled_from([{}, AS_THE_BASELINE]),
)
def test_every_batch_is_part_of_an_update_or_lost(
    overflow: List[int], nan: List[int], accum_grad: int, way: Dict[str, Any]
) -> None:
    train = training(overflow=overflow, nan=nan)
    fed: List[int] = []

    def feed() -> None:
        fed.append(updater.counters.fed)
        train.feed()

    policies = dict.fromkeys(("on_nonfinite_loss", "on_nonfinite_forward", "on_scale_floor"), "skip")
    updater = updater_on(train._replace(feed=feed), accum_grad=accum_grad, **policies, **way)
    results = []
    for _ in range(4):
        before = snapshot()
        results.append(updater.update())
        # A schedule of learning rates advances when parameters have changed.
        changed = any((value != before[name]).any() for name, value in snapshot().items())
        assert changed == results[-1].updated
    counters = updater.counters
    assert counters.updates == sum(result.updated for result in results)
    assert fed == list(range(counters.batches))
    assert counters.fed == len(fed)
    assert counters.batches == counters.updates * accum_grad + sum(counters.lost.values())
    thrown_away = sum(counters.lost.values()) // accum_grad
    assert sum(r.retries for r in results) + sum(not r.updated for r in results) >= thrown_away
    for result in results:
        if result.reason.startswith("nonfinite"):
            assert counters.lost[result.reason]


def test_a_batch_that_ends_in_an_error_is_lost_as_well() -> None:
    updater = updater_on(training(nan=[1]))
    updater.update()
    with pytest.raises(LossScaleError):
        updater.update()
    assert updater.counters == Counters(1, 2, 1, {"nonfinite_loss": 1}, fed=2)


@pytest.mark.parametrize(
    "change",
    [
        {"updates": -1},
        {"lost": {"overflow": -1}},
        {"batches": 1.5},
        {"lost": 3},
        {"repeats": None},
        {"fed": -1},
    ],
)
def test_damaged_counters_are_refused(change: Dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError, AttributeError)):
        Counters.from_dict({**asdict(Counters(3, 7, 2)), **change})


def test_a_batch_that_was_not_fed_is_asked_for_again() -> None:
    train, asked = training(), []

    def feed() -> None:
        asked.append(updater.counters.fed)
        if len(asked) == 4:
            raise ConnectionError
        train.feed()

    updater = updater_on(train._replace(feed=feed), accum_grad=2)
    updater.update()
    with pytest.raises(ConnectionError):
        updater.update()
    updater.update()
    assert asked == [0, 1, 2, 3, 2, 3]
    assert updater.state_dict()["counters"]["fed"] == 4
