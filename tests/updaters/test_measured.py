# SPDX-License-Identifier: Apache-2.0
"""Training with scales from what was measured: whatever overflows, nothing is lost."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, LossScaleError, LossScaleWarning
from tests.updaters.networks import METHODS, assert_equal, gate, snapshot, updater_of


class Work:
    """A network with batch normalization, whose batches can be spoilt, and its updater."""

    def __init__(self, **options: Any) -> None:
        nn.clear_parameters()
        nn.seed(0)
        self.factors: Dict[int, float] = {}
        self.hopeless: List[int] = []
        self.batches = 0
        rng = np.random.RandomState(0)
        x, t, factor, one = nn.Variable((8, 6)), nn.Variable((8, 1)), nn.Variable((1,)), nn.Variable((1,))
        h = PF.batch_normalization(PF.affine(x, 8, name="a", rng=rng), name="bn")
        y = PF.affine(F.tanh(h), 4, name="b", rng=rng)
        loss = F.sum(F.reshape(F.mean(F.softmax_cross_entropy(y, t)), (1,)) * factor)

        def feed() -> None:
            data = np.random.RandomState(self.batches)
            x.d, t.d = data.randn(*x.shape), data.randint(0, 4, t.shape)
            factor.d = self.factors.get(self.batches, 1.0)
            one.d = float(self.batches not in self.hopeless)
            self.batches += 1

        loss = loss + gate(y, one)
        self.updater = updater_of(loss, feed, solver=S.Sgd(0.05), **options)

    def train(self, updates: int) -> List[Any]:
        return [self.updater.update() for _ in range(updates)]


def config(method: str, delay: int = 0) -> AdaLossConfig:
    return AdaLossConfig(loss_scale_method=method, delay=delay)


def trained(iterations: int, factors: Dict[int, float], **options: Any) -> Tuple[Work, Dict[str, np.ndarray]]:
    work = Work(**options)
    work.factors.update(factors)
    assert all(result.updated for result in work.train(iterations))
    return work, snapshot()


def assert_close(found: Dict[str, np.ndarray], expected: Dict[str, np.ndarray]) -> None:
    for name, array in expected.items():
        atol = 0.02 * np.abs(array).max() + 2e-3
        np.testing.assert_allclose(found[name], array, rtol=0.02, atol=atol, err_msg=name)


IN_FP32 = {
    "storage": None,
    "global_scale": "dynamic",
    "scale": 1.0,
    "config": AdaLossConfig(loss_scale_method="fixed", dtype="float32"),
}
every_method = pytest.mark.parametrize("method", METHODS)


@pytest.mark.parametrize("global_scale", ["history", "dynamic"])
@pytest.mark.parametrize(("method", "delay"), [("approx_range", 0), ("approx_range", 1), ("amax_history", 1)])
@pytest.mark.parametrize(("accum_grad", "large"), [(1, 4), (3, 9), (3, 10), (3, 11)])
def test_an_overflow_in_any_batch_loses_nothing(
    accum_grad: int, large: int, method: str, delay: int, global_scale: str
) -> None:
    """Running statistics of batch normalization are those of each batch once, and gradients too."""
    factors = {large: 2.0**6}
    _, exact = trained(5, factors, accum_grad=accum_grad, **IN_FP32)
    options = {"global_scale": global_scale, "scale": 2.0**13 if global_scale == "dynamic" else 8.0}
    work, found = trained(5, factors, config=config(method, delay), accum_grad=accum_grad, **options)
    assert work.batches == 5 * accum_grad
    assert work.updater.counters.repeats > 1
    assert_close(found, exact)


@pytest.mark.parametrize("delay", [0, 1])
@every_method
def test_a_batch_that_no_scale_helps_is_thrown_away_alone(method: str, delay: int) -> None:
    work = Work(config=config(method, delay))
    work.train(3)
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


@every_method
@pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")
def test_after_too_many_of_them_scales_and_weights_are_as_before(method: str) -> None:
    work = Work(config=config(method))
    work.train(3)
    state, weights = work.updater.state_dict(), snapshot()
    work.hopeless = list(range(3, 28))
    with pytest.raises(LossScaleError, match="iteration 4 at the smallest loss scale"):
        work.updater.update()
    assert work.batches == 28
    after = work.updater.state_dict()
    assert after["scaling"]["components"] == state["scaling"]["components"]
    assert after["scale_state"] == state["scale_state"]
    assert_equal(snapshot(), weights)
    assert work.updater.update().updated
