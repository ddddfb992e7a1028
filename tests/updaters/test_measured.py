# SPDX-License-Identifier: Apache-2.0
"""Training with scales from what was measured: whatever overflows, nothing is lost."""

from __future__ import annotations

from typing import Any, Dict

import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, LossScaleError, LossScaleWarning
from tests.worlds.trainings import METHODS, training, updater_on
from tests.worlds.values import assert_equal, snapshot


def config(method: str, delay: int = 0) -> AdaLossConfig:
    return AdaLossConfig(loss_scale_method=method, delay=delay)


def trained(iterations: int, factors: Dict[int, float], **options: Any) -> Any:
    updater = updater_on(training(factors=factors), **options)
    assert all(updater.update().updated for _ in range(iterations))
    return updater


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
    trained(5, factors, accum_grad=accum_grad, **IN_FP32)
    exact = snapshot()
    options = {"global_scale": global_scale, "scale": 2.0**13 if global_scale == "dynamic" else 8.0}
    updater = trained(5, factors, config=config(method, delay), accum_grad=accum_grad, **options)
    assert updater.counters.batches == 5 * accum_grad
    assert updater.counters.repeats > 1
    assert_close(snapshot(), exact)


@pytest.mark.parametrize("delay", [0, 1])
@every_method
def test_a_batch_that_no_scale_helps_is_thrown_away_alone(method: str, delay: int) -> None:
    updater = updater_on(training(overflow=[3]), config=config(method, delay))
    for _ in range(3):
        updater.update()
    before = updater.scaling.components.state_dict(), updater.scale_state
    updater.solver.set_learning_rate(0.0)
    with pytest.warns(LossScaleWarning, match="not finite at any loss scale"):
        result = updater.update()
    assert result.updated
    assert updater.counters.batches == 5
    assert updater.scale_state == before[1]
    pushed = {name: values[0] for name, values in before[0]["windows"].items()}
    now = updater.scaling.components.state_dict()["windows"]
    # With delay=1 an entry takes as many iterations as there are shares.
    assert {name: values[0] - (not delay) for name, values in now.items()} == pushed
    assert updater.update().retries == 0


@every_method
@pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")
def test_after_too_many_of_them_scales_and_weights_are_as_before(method: str) -> None:
    updater = updater_on(training(overflow=range(3, 28)), config=config(method))
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
