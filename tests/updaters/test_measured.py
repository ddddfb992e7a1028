# SPDX-License-Identifier: Apache-2.0
"""Training with scales from what was measured: nothing is lost, and it goes on from a file bit for bit."""

from __future__ import annotations

import json
import warnings
from typing import Any, Dict, List, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScalingUpdater, LossScaleError, LossScaleWarning

METHODS = ("approx_range", "amax_history")


class Work:
    """A network with dropout and batch normalization, whose batches can be spoilt, and its updater."""

    def __init__(self, weight: float = 1.0, dropout: bool = False, **options: Any) -> None:
        nn.clear_parameters()
        nn.seed(0)
        self.factors: Dict[int, float] = {}
        self.hopeless: List[int] = []
        self.batches = 0
        rng = np.random.RandomState(0)
        x, t, factor, one = nn.Variable((8, 6)), nn.Variable((8, 1)), nn.Variable((1,)), nn.Variable((1,))
        h = PF.batch_normalization(PF.affine(x, 8, name="a", rng=rng), name="bn")
        h = F.dropout(F.tanh(h), 0.3) if dropout else F.tanh(h)
        y = PF.affine(h, 4, name="b", rng=rng)
        # sqrt has an infinite slope at 0: where `one` is 0, every gradient is lost while forward is finite.
        root = F.pow_scalar(F.reshape(F.mean(y) * 0.0, (1,)) + one, 0.5)
        self.loss = F.sum(F.reshape(F.mean(F.softmax_cross_entropy(y, t)), (1,)) * factor) * weight
        self.loss = self.loss + F.sum(root) * weight
        self.solver = S.Sgd(0.05 / weight)
        self.solver.set_parameters(nn.get_parameters())

        def feed() -> None:
            data = np.random.RandomState(self.batches)
            x.d, t.d = data.randn(*x.shape), data.randint(0, 4, t.shape)
            factor.d = self.factors.get(self.batches, 1.0)
            one.d = float(self.batches not in self.hopeless)
            self.batches += 1

        options = {"storage": "float16", **options}
        self.updater = AdaptiveLossScalingUpdater(self.solver, self.loss, feed, **options)

    def parameters(self) -> Dict[str, np.ndarray]:
        return {name: v.d.copy() for name, v in nn.get_parameters(grad_only=False).items()}


def config(method: str, delay: int = 0) -> AdaLossConfig:
    return AdaLossConfig(loss_scale_method=method, delay=delay)


def trained(iterations: int, factors: Dict[int, float], **options: Any) -> Tuple[Work, Dict[str, np.ndarray]]:
    work = Work(**options)
    work.factors.update(factors)
    for _ in range(iterations):
        assert work.updater.update().updated
    return work, work.parameters()


def assert_close(found: Dict[str, np.ndarray], expected: Dict[str, np.ndarray]) -> None:
    for name, array in expected.items():
        np.testing.assert_allclose(
            found[name], array, rtol=0.02, atol=0.02 * np.abs(array).max() + 2e-3, err_msg=name
        )


IN_FP32 = {"storage": None, "global_scale": "dynamic", "scale": 1.0}
FIXED = AdaLossConfig(loss_scale_method="fixed", dtype="float32")


@pytest.mark.parametrize("weight", [1e-6, 1e-3, 1.0, 1e3])
@pytest.mark.parametrize("method", METHODS)
def test_every_loss_weight_trains_as_in_fp32(method: str, weight: float) -> None:
    _, exact = trained(6, {}, config=FIXED, weight=weight, **IN_FP32)
    work, found = trained(6, {}, config=config(method), weight=weight)
    assert work.batches == 6
    assert_close(found, exact)


@pytest.mark.parametrize("global_scale", ["history", "dynamic"])
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("accum_grad", "large"), [(1, 4), (3, 9), (3, 10), (3, 11)])
def test_an_overflow_in_any_batch_loses_nothing(
    accum_grad: int, large: int, method: str, delay: int, global_scale: str
) -> None:
    """Running statistics of batch normalization are those of each batch once, and gradients too."""
    factors = {large: 2.0**6}
    options = {"accum_grad": accum_grad}
    _, exact = trained(5, factors, config=FIXED, **options, **IN_FP32)
    given = {"global_scale": global_scale, "scale": 2.0**13 if global_scale == "dynamic" else 8.0}
    work, found = trained(5, factors, config=config(method, delay), **options, **given)
    assert work.batches == 5 * accum_grad
    assert_close(found, exact)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("delay", [0, 1])
def test_it_goes_on_from_a_file_bit_for_bit(method: str, delay: int) -> None:
    for accum_grad in (1, 2):
        options = {"config": config(method, delay), "accum_grad": accum_grad}
        factors = {3: 2.0**8, 9 * accum_grad: 2.0**10}
        work, _ = trained(5, factors, **options)
        state, weights = json.loads(json.dumps(work.updater.state_dict())), work.parameters()
        expected = [work.updater.update() for _ in range(6)]
        last = work.parameters()
        again = Work(**options)
        again.factors.update(factors)
        again.batches = 5 * accum_grad
        for name, array in weights.items():
            nn.get_parameters(grad_only=False)[name].d = array
        again.updater.load_state_dict(state)
        assert [again.updater.update() for _ in range(6)] == expected
        for name, array in last.items():
            np.testing.assert_array_equal(again.parameters()[name], array, err_msg=name)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("method", METHODS)
def test_a_batch_that_no_scale_helps_is_thrown_away_alone(method: str, delay: int) -> None:
    work = Work(config=config(method, delay))
    for _ in range(3):
        work.updater.update()
    before = work.updater.scaling.components.state_dict(), work.updater.scale_state
    work.hopeless = [3]
    work.updater.solver.set_learning_rate(0.0)
    with pytest.warns(LossScaleWarning, match="not finite at any loss scale"):
        result = work.updater.update()
    assert result.updated
    assert work.batches == 5
    assert work.updater.scale_state == before[1]
    pushed = {name: values[0] for name, values in before[0]["windows"].items()}
    now = work.updater.scaling.components.state_dict()["windows"]
    # With delay=1 an entry takes as many iterations as there are shares.
    assert {name: values[0] - (not delay) for name, values in now.items()} == pushed
    assert work.updater.update().retries == 0


@pytest.mark.parametrize("method", METHODS)
def test_after_too_many_of_them_scales_and_weights_are_as_before(method: str) -> None:
    work = Work(config=config(method))
    for _ in range(3):
        work.updater.update()
    state, weights = work.updater.state_dict(), work.parameters()
    work.hopeless = list(range(3, 28))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(LossScaleError, match="iteration 4 at the smallest loss scale"):
            work.updater.update()
    assert work.batches == 28
    after = work.updater.state_dict()
    assert after["scaling"]["components"] == state["scaling"]["components"]
    assert after["scale_state"] == state["scale_state"]
    for name, array in weights.items():
        np.testing.assert_array_equal(work.parameters()[name], array, err_msg=name)
    assert work.updater.update().updated


@pytest.mark.parametrize("method", METHODS)
def test_without_repeats_an_iteration_is_skipped_and_the_scale_is_lower_then(method: str) -> None:
    work = Work(config=config(method), max_retries=0)
    for _ in range(3):
        assert work.updater.update().updated
    work.factors = {3: 2.0**8}
    result = work.updater.update()
    assert (result.updated, result.reason, result.retries) == (False, "overflow", 1)
    assert work.batches == 4
    assert work.updater.update().updated


@pytest.mark.parametrize("method", METHODS)
def test_dropout_draws_again_and_trains(method: str) -> None:
    work = Work(config=config(method), dropout=True)
    work.factors = {2: 2.0**8}
    results = [work.updater.update() for _ in range(5)]
    assert all(r.updated for r in results)
    assert work.batches == 5
    assert results[2].retries > 0
