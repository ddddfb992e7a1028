# SPDX-License-Identifier: Apache-2.0
"""What trains in emulated float16 trains in nnabla's own half precision, as in fp32: nothing is set, no loss
weight is too small or too large, and nothing goes wrong in silence.
"""

from __future__ import annotations

import logging
from typing import Any, Callable, Dict, NamedTuple, Optional

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import (
    AdaLossConfig,
    AdaptiveLossScalingUpdater,
    FixedLossScalingUpdater,
    GradScaler,
    LossScaleWarning,
)
from tests.worlds.trainings import AS_THE_BASELINE, Loop, scaler_step, solver_of, updater_of
from tests.worlds.values import FLOAT, HALF, constant, data
from tests.worlds.warned import silent

Make = Callable[[np.random.RandomState], nn.Variable]
ITERATIONS = 24


def some(*shape: int) -> nn.Variable:
    return data(*shape, seed=len(shape))


def labels(count: int, classes: int) -> nn.Variable:
    return constant(np.random.RandomState(9).randint(0, classes, (count, 1)))


def classifier(rng: np.random.RandomState) -> nn.Variable:
    h = F.tanh(PF.affine(some(8, 5), 8, name="a", rng=rng))
    return F.mean(F.softmax_cross_entropy(PF.affine(h, 3, name="b", rng=rng), labels(8, 3)))


def convolution(rng: np.random.RandomState) -> nn.Variable:
    h = PF.convolution(some(4, 2, 5, 5), 3, (3, 3), name="conv", rng=rng)
    h = F.relu(PF.batch_normalization(h, name="bn"))
    return F.mean(F.softmax_cross_entropy(PF.affine(h, 3, name="b", rng=rng), labels(4, 3)))


def two_terms(rng: np.random.RandomState) -> nn.Variable:
    """Two losses on one network, one a millionth of the other."""
    h = F.tanh(PF.affine(some(8, 5), 8, name="a", rng=rng))
    first = F.mean(F.squared_error(PF.affine(h, 1, name="b", rng=rng), some(8, 1)))
    second = F.mean(F.squared_error(PF.affine(h, 1, name="c", rng=rng), some(8, 1)))
    return first + 1e-6 * second


NETS = [classifier, convolution, two_terms]


class Trained(NamedTuple):
    """The loss before and after a training, without its weight."""

    first: float
    last: float

    def is_near(self, exact: Trained) -> bool:
        """The loss of one batch that is learned by heart: differences grow with every update."""
        return abs(self.last - exact.last) < 0.05 * (exact.first - exact.last)


def built(make: Make, weight: float, storage: Optional[str]) -> nn.Variable:
    """A loss in fp32 or emulated, or, without a `storage`, in native half."""
    with nn.context_scope(HALF if storage is None else FLOAT):
        return make(np.random.RandomState(0)) * weight


def train(make: Make, weight: float, storage: Optional[str], **options: Any) -> Trained:
    nn.clear_parameters()
    nn.seed(0)
    loss = built(make, weight, storage)
    updater = updater_of(loss, solver=S.Momentum(0.05 / weight), storage=storage, **options)
    losses = []
    for _ in range(ITERATIONS):
        assert updater.update().reason == "updated"
        losses.append(float(updater.loss.d) / weight)
    assert not updater.counters.lost or updater.on_overflow == "next"
    return Trained(losses[0], losses[-1])


@pytest.mark.parametrize("weight", [1e8, 1.0, 1e-8, 1e-30])
@pytest.mark.parametrize("net", NETS)
def test_trains_as_fp32_does_emulated_and_natively(net: Make, weight: float) -> None:
    with silent():
        exact, *others = (train(net, weight, storage) for storage in ("float32", "float16", None))
    assert exact.last < 0.9 * exact.first
    for found in others:
        assert found.first == pytest.approx(exact.first, rel=0.01)
        assert found.is_near(exact), (exact, others)


@pytest.mark.parametrize(
    "options",
    [
        {"config": AdaLossConfig(delay=1)},
        {"config": AdaLossConfig(loss_scale_method="amax_history")},
        {"config": AdaLossConfig(loss_scale_method="amax_history", delay=1)},
        {"config": AdaLossConfig(loss_scale_method="fixed")},
        {"accum_grad": 2, "average": True},
        {**AS_THE_BASELINE, "scale": 65536.0},
    ],
)
@pytest.mark.parametrize("weight", [1e4, 1e-9])
def test_trains_natively_with_other_settings(weight: float, options: Dict[str, Any]) -> None:
    exact, native = (train(classifier, weight, storage, **options) for storage in ("float32", None))
    assert native.is_near(exact)


def test_a_large_weight_leaves_its_scaled_copy_in_range() -> None:
    """Gradients alone would have the layer scaled by more: what meets the weight is zero."""
    with nn.context_scope(HALF):
        h = F.tanh(PF.affine(some(8, 5), 6, name="a", rng=np.random.RandomState(0)))
        w = np.full((6, 6), 1e-3, np.float32)
        w[0, 0] = 3e4
        y = PF.affine(h, 6, name="b", w_init=w)
        loss = F.mean((y * constant([[0.0, 1.0, 1.0, 1.0, 1.0, 1.0]]) - 1.0) ** 2)
    updater = updater_of(loss, solver=S.Sgd(0.0), storage=None)
    results = [updater.update() for _ in range(6)]
    assert [result.overflow_layers for result in results] == [()] * 6
    assert updater.scaling.layer_scales == {"b/affine": 2.0}


def after_its_own_forward(loop: Loop) -> None:
    scaler = GradScaler(loop.solver)
    for _ in range(ITERATIONS):
        loop.feed()
        loop.solver.zero_grad()
        loop.loss.forward()
        scaler.backward(loop.loss)
        assert scaler.step(loop.solver)
        scaler.update()


LOOPS: Dict[str, Callable[[Loop], Any]] = {
    "adaptive": lambda loop: loop.updated(ITERATIONS),
    "fixed": lambda loop: loop.updated(ITERATIONS, FixedLossScalingUpdater, scale=2.0**40),
    "scaler": lambda loop: loop.scaled(ITERATIONS),
    "after the loss's own forward": after_its_own_forward,
}


@pytest.mark.parametrize("rebuilt", [False, True])
@pytest.mark.parametrize("way", LOOPS)
def test_trains_natively_in_other_loops(way: str, rebuilt: bool) -> None:
    weight = 1e-9
    exact = train(classifier, weight, "float32")
    solver = S.Momentum(0.05 / weight)
    loop = Loop(lambda _: built(classifier, weight, None), (1,), rebuilt=rebuilt, solver=solver)
    LOOPS[way](loop)
    assert Trained(exact.first, float(loop.loss.d) / weight).is_near(exact)


@pytest.mark.parametrize("storage", [None, "float16"])
def test_gradients_that_are_all_zero_are_told_of_once(storage: Optional[str]) -> None:
    loss, solver = built(classifier, 1e-20, storage), solver_of()
    scaler = GradScaler(solver, storage=storage, float_tail=False)
    # Natively nobody knows that the loss was rounded to zero: a batch may have nothing to learn from.
    with pytest.warns(LossScaleWarning, match="every gradient is exactly zero") as caught:
        updated = [scaler_step(scaler, solver, loss) for _ in range(101)]
    assert all(updated)
    assert len(caught) == 1


def test_grad_scaler_reports_cleared_activations() -> None:
    loss = built(classifier, 1e-9, None)
    solver = solver_of()
    scaler = GradScaler(solver)
    loss.forward(clear_buffer=True)
    with pytest.raises(RuntimeError, match="forward has to run again before backward"):
        scaler.backward(loss)
    scaler.forward(loss)
    scaler.backward(loss)
    assert scaler.step(solver)


def test_the_graph_can_be_left_as_it_is() -> None:
    loss = built(classifier, 1.0, None)
    solver, before = solver_of(), loss.parent
    assert AdaptiveLossScalingUpdater(solver, loss, float_tail=False).update().updated
    GradScaler(solver, float_tail=False).forward(loss)
    assert loss.parent == before


def test_it_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def feed() -> None:
        updater.loss = built(classifier, 1.0, None)

    updater = updater_of(built(classifier, 1.0, None), feed, storage=None)
    with caplog.at_level(logging.INFO, "nnabla_adaloss"):
        for _ in range(3):
            updater.update()
    assert caplog.text.count("compute in float") == 1


def test_a_leaf_whose_gradient_nobody_writes_or_zeroes() -> None:
    """As the noise that `vat_noise` normalizes: nnabla asks for no gradient array of it."""
    rng = np.random.RandomState(0)
    with nn.context_scope(HALF):
        noise, kept = (nn.Variable((4, 5), need_grad=True) for _ in range(2))
        noise.d, kept.d = rng.randn(4, 5), 0.1
        x = nn.Variable.from_numpy_array(rng.randn(4, 5).astype(np.float32))
        loss = F.mean(PF.affine(x + F.vat_noise(noise, kept, 1, 1.0), 3, name="a") ** 2)
    solver = solver_of(S.Sgd(0.1))
    updater = AdaptiveLossScalingUpdater(solver, loss, lambda: None)
    for _ in range(4):
        assert updater.update().reason == "updated"
    assert updater.scaling.result.kind == "hookless"


def test_a_half_network_with_a_loss_in_float_is_an_ordinary_network() -> None:
    rng = np.random.RandomState(0)
    with nn.context_scope(HALF):
        h = PF.affine(F.tanh(PF.affine(some(8, 5), 8, name="a", rng=rng)), 3, name="b", rng=rng)
    with nn.context_scope(FLOAT):
        loss = F.mean(F.softmax_cross_entropy(h, labels(8, 3))) * 1e-9
    with silent():
        updater = updater_of(loss, solver=S.Momentum(0.05 * 1e9), storage=None)
        assert {updater.update().reason for _ in range(10)} == {"updated"}
    assert updater.scaling.config.dtype == "float16"
    assert float(loss.d) * 1e9 < train(classifier, 1e-9, "float32").first


def test_weights_are_measured_in_fp32_although_functions_read_them_in_half() -> None:
    with nn.context_scope(HALF):
        loss = classifier(np.random.RandomState(1))
    updater = updater_of(loss, storage=None, config=AdaLossConfig(measure_every=1))
    parameters = nn.get_parameters()
    for _ in range(6):
        # Read without a conversion of the array.
        stored = {name: float(np.abs(v.data.get_data("r")).max()) for name, v in parameters.items()}
        updater.update()
        weights = updater.scaling._graph.current().statistics.weights
        assert weights
        assert {name: one.abs_max for name, one in weights.items()} == {
            name: stored[name] for name in weights
        }
        assert any(np.float16(stored[name]) != stored[name] for name in weights)
