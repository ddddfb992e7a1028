# SPDX-License-Identifier: Apache-2.0
"""Where the global scale starts, what it and the scales of components remember, and what ranks make of it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, Dict, List

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScalingUpdater, AmaxHistory, HistoryPolicy
from nnabla_adaloss.core.scale_policy import ScalePolicy, ScaleState
from nnabla_adaloss.kernels import CpuKernels
from nnabla_adaloss.updaters.global_scale import GlobalScale
from tests.worlds.ranks import Pair
from tests.worlds.tampering import Gate
from tests.worlds.trainings import METHODS, updater_of
from tests.worlds.values import data


def updater_with(depth: int = 2, batch: int = 16, **options: Any) -> AdaptiveLossScalingUpdater:
    nn.clear_parameters()
    h = data(batch, 64)
    for i in range(depth):
        h = F.tanh(PF.affine(h, 64, name=f"fc{i}"))
    return updater_of(F.mean(h**2), solver=S.Sgd(1e-3), **options)


def test_a_policy_starts_with_its_own_scale() -> None:
    updater = updater_with(global_scale=HistoryPolicy(start_scale=1024.0))
    assert updater.scale == updater.scaling.components.policy.start_scale == 1024.0
    updater = updater_with(scale=32.0)
    assert updater.scale == updater.scaling.components.policy.start_scale == 32.0


def test_components_follow_the_policy_unless_the_method_says_otherwise() -> None:
    policy = HistoryPolicy(margin=16.0, window=8)
    for method, margin, window in (("amax_history", 16.0, 8), (AmaxHistory(window=4), 16.0, 4)):
        updater = updater_with(global_scale=policy, config=AdaLossConfig(loss_scale_method=method))
        found = updater.scaling.components.policy
        assert (found.margin, found.window) == (margin, window)


@pytest.mark.parametrize("method", METHODS)
def test_a_gradient_is_remembered_for_so_many_iterations_however_often_they_are_measured(method: str) -> None:
    for every, served, measurements in ((1, 1, 256), (8, 1, 32), (1, 16, 16)):
        config = AdaLossConfig(loss_scale_method=method, measure_every=every, update_per_n_iteration=served)
        updater = updater_with(global_scale=HistoryPolicy(window=256), config=config)
        assert updater.scaling.components.policy.window == measurements


@pytest.mark.parametrize("comm", [None, Pair()])
def test_a_measured_scale_is_that_of_the_last_update(comm: Any) -> None:
    updater, scales = (
        searched({}, global_scale="history", comm=comm, config=AdaLossConfig(measure_every=1)),
        [],
    )
    for weight in (1.0, 2.0**-8, 2.0**4):
        updater.loss = updater.loss * weight
        assert updater.update().scale == updater.scale == updater.scaling.loss_scale
        scales.append(updater.scale)
    assert len({*scales}) == 3


def test_a_measured_scale_is_not_lowered_beside_those_of_components() -> None:
    s0 = GlobalScale(8.0, ScalePolicy(), HistoryPolicy())
    before = s0.state
    assert not s0.lower()
    assert s0.state == before


def test_all_ranks_have_the_lowest_scale_after_an_exchange() -> None:
    s0 = GlobalScale(8.0, ScalePolicy(hysteresis=3), None)
    heard: List[Any] = []
    scaling: Any = SimpleNamespace(
        shared_statistics=lambda: {"layer": [1.0]},
        adopt_statistics=lambda told: heard.append(told),
        kernels=CpuKernels(),
    )
    for other, lowest in (
        ((16.0, 7.0, 1.0), (8.0, 0, 3)),
        # Of two that have the same, the one that has overflowed more often in a row.
        ((8.0, 4.0, 2.0), (8.0, 4, 2)),
        ((4.0, 5.0, 2.0), (4.0, 5, 2)),
    ):
        theirs = {"S0": other, "layer of another graph": [2.0], "bad": [0.0]}
        exchange: Any = SimpleNamespace(
            sum_with=lambda own, kernels, average, theirs=theirs: ([own, theirs], True)
        )
        found = s0.exchange(exchange, scaling, average=False, alike=False, bad=False)
        assert found == (lowest[0], False)
        assert s0.state == ScaleState(*lowest)
        # What layers are scaled by comes with it.
        assert heard.pop()[1] is theirs


@pytest.mark.parametrize("measured", [None, {"layer": [1.0]}])
@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("finite", [False, True])
@pytest.mark.parametrize("bad", [[False, False], [True, False], [False, True]])
def test_gradients_of_a_rank_that_are_bad_are_used_by_none(
    measured: Any, alike: bool, finite: bool, bad: List[bool]
) -> None:
    """Though they are finite, as they are where a rank has looked at its batch with a smaller scale."""
    s0, sent = GlobalScale(8.0, ScalePolicy(), None), []
    of_s0 = {} if alike else {"S0": [8.0, 0, s0.state.hysteresis_left]}

    def told(own: Any, kernels: Any, *, average: bool) -> Any:
        sent.append(own)
        return [own, {**own, "bad": [float(bad[1])]}], finite

    exchange: Any = SimpleNamespace(sum_with=told)
    scaling: Any = SimpleNamespace(
        shared_statistics=lambda: measured, adopt_statistics=lambda told: None, kernels=CpuKernels()
    )
    found = s0.exchange(exchange, scaling, average=True, alike=alike, bad=bad[0])
    assert found == (8.0, any(bad) or not finite)
    assert sent == [{**(measured or {}), **of_s0, "bad": [float(bad[0])]}]


# A searched S0 is a limit at the loss.


@pytest.mark.parametrize("on_overflow", ["next", "repeat"])
@pytest.mark.parametrize("weight", [1.0, 1e-12])
def test_a_small_s0_leaves_the_gradients_of_deep_layers_their_scales(on_overflow: str, weight: float) -> None:
    """Limited as those at the loss are, all components behind twelve sigmoids would be flushed to zero."""
    nn.clear_parameters()
    nn.seed(0)
    h = data(16, 8)
    for index in range(12):
        h = F.sigmoid(PF.affine(h, 8, name=f"layer{index}"))
    loss, first = F.mean(h**2) * weight, nn.get_parameters()["layer0/affine/W"]
    lost: List[float] = []
    updater = updater_of(
        loss,
        solver=S.Sgd(0.0),
        global_scale="dynamic",
        on_overflow=on_overflow,
        storage="float16",
        on_gradients=lambda solver: lost.append(float((first.g == 0.0).mean())),
    )
    for _ in range(10):
        assert updater.update().scale == 8.0
    assert lost == [0.0] * 10
    # At the loss nothing exceeds S0.
    schedule = updater.scaling.result.schedule
    for index in schedule.components.at_loss:
        assert schedule.component_scales[index] * schedule.loss_weights[index] <= 8.0


def searched(factors: Dict[int, float], **options: Any) -> AdaptiveLossScalingUpdater:
    """An updater with a searched S0; `factors` multiply the gradients of some batches."""
    nn.clear_parameters()
    gate, batches = Gate(), itertools.count()
    h = F.tanh(PF.affine(data(8, 8), 8, name="a"))

    def feed() -> None:
        gate.factor = factors.get(next(batches), 1.0)

    loss = F.mean(PF.affine(gate(h), 8, name="b") ** 2)
    options = {"global_scale": "dynamic", "storage": "float16", "scale": 2.0**13, **options}
    return updater_of(loss, feed, solver=S.Sgd(0.0), **options)


@pytest.mark.parametrize("method", ["amax_history", "approx_range"])
def test_s0_goes_down_once_for_a_batch_however_often_it_runs(method: str) -> None:
    updater = searched({3: 2.0**24}, config=AdaLossConfig(method))
    for _ in range(3):
        updater.update()
    result = updater.update()
    assert result.updated
    assert result.retries > 1
    assert [result.scale, updater.update().scale] == [2.0**12] * 2


def test_s0_goes_down_until_the_batch_fits_if_nothing_else_can_be_lowered() -> None:
    updater = searched({1: 2.0**18}, config=AdaLossConfig("fixed"))
    updater.update()
    result = updater.update()
    assert result.updated
    assert result.retries > 1
    assert result.scale == 2.0 ** (13 - result.retries)


# With delay=0 every batch runs twice, whether it overflows or not.
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("on_overflow", ["next", "repeat"])
@pytest.mark.parametrize(("second", "scale"), [(3, 2.0**12), (4, 2.0**13)])
def test_hysteresis_counts_batches_in_a_row(on_overflow: str, second: int, scale: float, delay: int) -> None:
    config = AdaLossConfig(delay=delay)
    updater = searched({2: 2.0**24, second: 2.0**40}, on_overflow=on_overflow, hysteresis=2, config=config)
    results = [updater.update() for _ in range(6)]
    assert updater.scale == scale
    assert all(result.updated for result in results)
    lost = updater.counters.lost
    assert lost == ({"overflow": 2} if on_overflow == "next" else {})
