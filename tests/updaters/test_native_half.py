# SPDX-License-Identifier: Apache-2.0
"""What trains in emulated float16 trains in nnabla's own half precision, as in fp32: nothing is set, no loss
weight is too small or too large, and nothing goes wrong in silence.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any, Callable, Dict, NamedTuple, Optional

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest
from nnabla.initializer import UniformInitializer

from nnabla_adaloss import (
    AdaLossConfig,
    AdaptiveLossScalingUpdater,
    FixedLossScalingUpdater,
    GradScaler,
    LossScaleWarning,
)

HALF = nn.Context(["cpu:half", "cpu:float"], "CpuCachedArray", "0")
FLOAT = nn.Context(["cpu:float"], "CpuCachedArray", "0")
Make = Callable[[np.random.RandomState], nn.Variable]
ITERATIONS = 24


def data(*shape: int) -> nn.Variable:
    return nn.Variable.from_numpy_array(np.random.RandomState(len(shape)).randn(*shape).astype(np.float32))


def labels(count: int, classes: int) -> nn.Variable:
    return nn.Variable.from_numpy_array(np.random.RandomState(9).randint(0, classes, (count, 1)))


def classifier(rng: np.random.RandomState) -> nn.Variable:
    h = F.tanh(PF.affine(data(8, 5), 8, name="a", rng=rng))
    return F.mean(F.softmax_cross_entropy(PF.affine(h, 3, name="b", rng=rng), labels(8, 3)))


def regression(rng: np.random.RandomState) -> nn.Variable:
    h = F.relu(PF.affine(data(8, 5), 8, name="a", rng=rng))
    return F.mean(F.squared_error(PF.affine(h, 2, name="b", rng=rng), data(8, 2)))


def convolution(rng: np.random.RandomState) -> nn.Variable:
    h = PF.convolution(data(4, 2, 5, 5), 3, (3, 3), name="conv", rng=rng)
    h = F.relu(PF.batch_normalization(h, name="bn"))
    return F.mean(F.softmax_cross_entropy(PF.affine(h, 3, name="b", rng=rng), labels(4, 3)))


def residual(rng: np.random.RandomState) -> nn.Variable:
    h = PF.affine(data(6, 5), 6, name="a", rng=rng)
    for name in ("b", "c"):
        h = h + PF.affine(F.tanh(h), 6, name=name, rng=rng)
    return F.mean(F.squared_error(PF.affine(h, 1, name="d", rng=rng), data(6, 1)))


def attention(rng: np.random.RandomState) -> nn.Variable:
    x = data(4, 3, 4)
    q, k, v = (PF.affine(x, 4, base_axis=2, name=name, rng=rng) for name in "qkv")
    scores = F.softmax(F.batch_matmul(q, k, transpose_b=True) * 0.5)
    h = PF.affine(F.batch_matmul(scores, v), 3, name="b", rng=rng)
    return F.mean(F.softmax_cross_entropy(h, labels(4, 3)))


def two_terms(rng: np.random.RandomState) -> nn.Variable:
    """Two losses on one network, one a millionth of the other."""
    h = F.tanh(PF.affine(data(8, 5), 8, name="a", rng=rng))
    first = F.mean(F.squared_error(PF.affine(h, 1, name="b", rng=rng), data(8, 1)))
    second = F.mean(F.squared_error(PF.affine(h, 1, name="c", rng=rng), data(8, 1)))
    return first + 1e-6 * second


def recurrent(rng: np.random.RandomState) -> nn.Variable:
    """It keeps references of its own to its gradients."""
    h, _, _ = PF.lstm(data(3, 2, 3), data(1, 1, 2, 4), data(1, 1, 2, 4), rng=rng)
    return F.mean(F.squared_error(PF.affine(h, 2, base_axis=2, name="b", rng=rng), data(3, 2, 2)))


def normalized(rng: np.random.RandomState) -> nn.Variable:
    weight = PF.spectral_norm(
        nn.parameter.get_parameter_or_create("w", (5, 6), UniformInitializer((-1, 1), rng))
    )
    h = F.tanh(F.affine(data(8, 5), weight))
    return F.mean(F.squared_error(PF.affine(h, 2, name="b", rng=rng), data(8, 2)))


NETS: Dict[str, Make] = {
    make.__name__: make
    for make in (
        classifier,
        regression,
        convolution,
        residual,
        attention,
        two_terms,
        recurrent,
        normalized,
    )
}
WEIGHTS = [1e8, 1e4, 1.0, 1e-4, 1e-7, 1e-8, 1e-9, 1e-11, 1e-30]


class Trained(NamedTuple):
    """The loss before and after a training, without its weight."""

    first: float
    last: float


def built(make: Make, weight: float, storage: Optional[str]) -> nn.Variable:
    with nn.context_scope(HALF if storage is None else FLOAT):
        return make(np.random.RandomState(0)) * weight


def train(make: Make, weight: float, storage: Optional[str], **options: Any) -> Trained:
    """A training; `storage` is "float32", "float16" (emulated), or None for native half."""
    nn.clear_parameters()
    nn.seed(0)
    loss = built(make, weight, storage)
    solver = S.Momentum(0.05 / weight)
    solver.set_parameters(nn.get_parameters())
    updater = AdaptiveLossScalingUpdater(solver, loss, storage=storage, **options)
    losses = []
    for _ in range(ITERATIONS):
        assert updater.update().reason == "updated"
        losses.append(float(updater.loss.d) / weight)
    assert not updater.counters.lost or updater.on_overflow == "next"
    return Trained(losses[0], losses[-1])


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("net", NETS)
def test_trains_as_fp32_does_emulated_and_natively(net: str, weight: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", LossScaleWarning)
        exact, emulated, native = (
            train(NETS[net], weight, storage) for storage in ("float32", "float16", None)
        )
    assert exact.last < 0.9 * exact.first
    # The loss of one batch that is learned by heart: differences grow with every update.
    allowed = 0.05 * (exact.first - exact.last)
    for found in (emulated, native):
        assert found.first == pytest.approx(exact.first, rel=0.01)
        assert abs(found.last - exact.last) < allowed, (exact, emulated, native)


@pytest.mark.parametrize(
    "options",
    [
        {"config": AdaLossConfig(delay=1)},
        {"config": AdaLossConfig(loss_scale_method="amax_history")},
        {"config": AdaLossConfig(loss_scale_method="amax_history", delay=1)},
        {"config": AdaLossConfig(loss_scale_method="fixed")},
        {"accum_grad": 2, "average": True},
        {"global_scale": "dynamic", "on_overflow": "next", "scale": 65536.0},
    ],
    ids=["delay=1", "amax_history", "amax_history, delay=1", "fixed", "accumulated", "dynamic"],
)
@pytest.mark.parametrize("weight", [1e4, 1e-9])
def test_trains_natively_with_other_settings(weight: float, options: Dict[str, Any]) -> None:
    exact, native = (train(classifier, weight, storage, **options) for storage in ("float32", None))
    assert native.last == pytest.approx(exact.last, abs=0.05 * (exact.first - exact.last))


@pytest.mark.parametrize("weight", [1e4, 1e-9])
def test_trains_natively_on_graphs_that_are_built_again(weight: float) -> None:
    exact = train(classifier, weight, "float32")
    nn.clear_parameters()
    solver = S.Momentum(0.05 / weight)
    loss = built(classifier, weight, None)
    solver.set_parameters(nn.get_parameters())

    def feed() -> None:
        updater.loss = built(classifier, weight, None)

    updater = AdaptiveLossScalingUpdater(solver, loss, feed)
    passes = []
    for _ in range(ITERATIONS):
        assert updater.update().updated
        passes.append(updater.scaling.result.kind)
    assert float(updater.loss.d) / weight == pytest.approx(exact.last, abs=0.05 * (exact.first - exact.last))
    assert passes.count("hookless") > ITERATIONS // 2


@pytest.mark.parametrize("rebuilt", [False, True])
@pytest.mark.parametrize("forward", ["scaler", "loss"])
@pytest.mark.parametrize("weight", [1e4, 1e-9])
def test_grad_scaler_trains_natively(weight: float, forward: str, rebuilt: bool) -> None:
    exact = train(classifier, weight, "float32")
    nn.clear_parameters()
    solver = S.Momentum(0.05 / weight)
    loss = built(classifier, weight, None)
    solver.set_parameters(nn.get_parameters())
    scaler = GradScaler(solver)
    for _ in range(ITERATIONS):
        if rebuilt:
            loss = built(classifier, weight, None)
        solver.zero_grad()
        if forward == "scaler":
            scaler.forward(loss)
        else:
            loss.forward()
        scaler.backward(loss)
        assert scaler.step(solver)
        scaler.update()
    assert float(loss.d) / weight == pytest.approx(exact.last, abs=0.05 * (exact.first - exact.last))


@pytest.mark.parametrize("storage", [None, "float16"])
def test_grad_scaler_says_when_there_is_no_gradient(storage: Optional[str]) -> None:
    nn.clear_parameters()
    loss = built(classifier, 1e-20, storage)
    solver = S.Sgd(0.1)
    solver.set_parameters(nn.get_parameters())
    scaler = GradScaler(solver, storage=storage, float_tail=False)

    def train() -> None:
        for _ in range(12):
            solver.zero_grad()
            scaler.forward(loss)
            scaler.backward(loss)
            scaler.step(solver)
            scaler.update()

    with pytest.warns(LossScaleWarning, match="every gradient is exactly zero") as caught:
        train()
    assert len(caught) == 1


@pytest.mark.parametrize("storage", [None, "float16"])
def test_a_fixed_scale_that_is_too_small_is_reported(storage: Optional[str]) -> None:
    nn.clear_parameters()
    loss = built(classifier, 1e-20, storage)
    solver = S.Sgd(0.1)
    solver.set_parameters(nn.get_parameters())
    updater = FixedLossScalingUpdater(solver, loss, storage=storage)
    with pytest.warns(LossScaleWarning, match="every gradient is exactly zero in iteration 1") as caught:
        reasons = [updater.update().reason for _ in range(3)]
    assert reasons == ["zero_gradients"] * 3
    assert len(caught) == 1


def test_grad_scaler_says_when_what_it_needs_was_cleared() -> None:
    nn.clear_parameters()
    loss = built(classifier, 1e-9, None)
    solver = S.Sgd(0.1)
    solver.set_parameters(nn.get_parameters())
    scaler = GradScaler(solver)
    loss.forward(clear_buffer=True)
    with pytest.raises(RuntimeError, match="forward has to run again before backward"):
        scaler.backward(loss)
    scaler.forward(loss)
    scaler.backward(loss)
    assert scaler.step(solver)


@pytest.mark.parametrize("rebuilt", [False, True])
def test_a_fixed_scale_trains_natively(rebuilt: bool) -> None:
    weight = 1e-9
    exact = train(classifier, weight, "float32")
    nn.clear_parameters()
    solver = S.Momentum(0.05 / weight)
    loss = built(classifier, weight, None)
    solver.set_parameters(nn.get_parameters())

    def feed() -> None:
        if rebuilt:
            updater.loss = built(classifier, weight, None)

    updater = FixedLossScalingUpdater(solver, loss, feed, scale=2.0**40)
    for _ in range(ITERATIONS):
        assert updater.update().updated
    assert float(updater.loss.d) / weight == pytest.approx(exact.last, abs=0.05 * (exact.first - exact.last))


def test_the_graph_can_be_left_as_it_is() -> None:
    nn.clear_parameters()
    loss = built(classifier, 1.0, None)
    solver = S.Sgd(0.1)
    solver.set_parameters(nn.get_parameters())
    before = loss.parent
    for scaled in (
        AdaptiveLossScalingUpdater(solver, loss, float_tail=False),
        FixedLossScalingUpdater(solver, loss, float_tail=False),
    ):
        assert scaled.update().updated
    GradScaler(solver, float_tail=False).forward(loss)
    assert loss.parent == before
    with pytest.raises(TypeError, match="float_tail=1 must be True or False"):
        AdaptiveLossScalingUpdater(solver, loss, float_tail=1)  # type: ignore[arg-type]


def test_it_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    nn.clear_parameters()
    loss = built(classifier, 1.0, None)
    solver = S.Sgd(0.1)
    solver.set_parameters(nn.get_parameters())

    def feed() -> None:
        updater.loss = built(classifier, 1.0, None)

    updater = AdaptiveLossScalingUpdater(solver, loss, feed)
    with caplog.at_level(logging.INFO, "nnabla_adaloss"):
        for _ in range(3):
            updater.update()
    assert caplog.text.count("compute in float") == 1


def test_a_half_network_with_a_loss_in_float_is_an_ordinary_network() -> None:
    nn.clear_parameters()
    rng = np.random.RandomState(0)
    with nn.context_scope(HALF):
        h = PF.affine(F.tanh(PF.affine(data(8, 5), 8, name="a", rng=rng)), 3, name="b", rng=rng)
    with nn.context_scope(FLOAT):
        loss = F.mean(F.softmax_cross_entropy(h, labels(8, 3))) * 1e-9
    solver = S.Momentum(0.05 * 1e9)
    solver.set_parameters(nn.get_parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error", LossScaleWarning)
        updater = AdaptiveLossScalingUpdater(solver, loss)
        assert {updater.update().reason for _ in range(10)} == {"updated"}
    assert updater.scaling.config.dtype == "float16"
    exact = train(classifier, 1e-9, "float32")
    assert float(loss.d) * 1e9 < exact.first
