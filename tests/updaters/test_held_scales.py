# SPDX-License-Identifier: Apache-2.0
"""Trainings whose scales are held for some iterations: how they are applied changes nothing."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScalingUpdater, UpdateResult
from nnabla_adaloss.engine.passes import backward_pass
from tests.worlds.ranks import Pair
from tests.worlds.trainings import AS_THE_BASELINE, METHODS, solver_of, training, updater_of, updater_on
from tests.worlds.values import assert_equal, constant, data, snapshot

pytestmark = pytest.mark.any_context

EVERY = 4


def hooked_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no pass be planned."""
    planned = None, "not in this test"
    monkeypatch.setattr(backward_pass, "plan_steps", lambda *args, **options: planned)


def trained(iterations: int, **options: Any) -> Tuple[List[UpdateResult], Dict[str, np.ndarray], Any]:
    train = training(overflow=[10], nan=[17], seed=1)
    policies = dict.fromkeys(("on_scale_floor", "on_nonfinite_loss", "on_nonfinite_forward"), "skip")
    updater = updater_on(train, **policies, **options)
    results = [updater.update() for _ in range(iterations)]
    return results, snapshot(train.parameters), updater.state_dict()


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "options", [{}, AS_THE_BASELINE, {"accum_grad": 2}], ids=["history", "baseline", "accumulated"]
)
def test_iterations_planned_are_iterations_hooked(
    monkeypatch: pytest.MonkeyPatch, delay: int, method: str, options: Dict[str, Any]
) -> None:
    config = AdaLossConfig(loss_scale_method=method, measure_every=EVERY, delay=delay)
    results, parameters, state = trained(28, config=config, **options)
    hooked_everywhere(monkeypatch)
    other_results, other_parameters, other_state = trained(28, config=config, **options)
    assert results == other_results
    assert state == other_state
    assert_equal(other_parameters, parameters)
    assert sum(result.updated for result in results) >= 26


def exploding(**options: Any) -> Tuple[AdaptiveLossScalingUpdater, nn.Variable]:
    """An updater that changes nothing, and what its loss is multiplied by."""
    rng, factor = np.random.RandomState(0), constant(np.ones((1, 1)))
    h = F.tanh(PF.affine(data(8, 6), 6, name="a", rng=rng))
    loss = F.mean(F.tanh(PF.affine(h, 6, name="b", rng=rng)) * factor)
    return updater_of(loss, solver=S.Sgd(0.0), **options), factor


@pytest.mark.parametrize("comm", [None, Pair(size=1)])
def test_a_batch_without_repeats_is_lost_though_lower_scales_were_tried(comm: Any) -> None:
    """Also where ranks decide by the sum of their gradients."""
    updater, factor = exploding(on_overflow="next", comm=comm)
    for _ in range(5):
        updater.update()
    factor.d = 2.0**4
    result = updater.update()
    assert result.updated
    assert result.retries == updater.counters.lost["overflow"] == 1
    assert [updater.update().retries for _ in range(5)] == [0] * 5


def test_a_scale_that_is_set_is_used_at_once() -> None:
    updater, _ = exploding(config=AdaLossConfig(loss_scale_method="amax_history", measure_every=50))
    for _ in range(3):
        updater.update()
    calibrated = updater.scale
    updater.scale = 2.0
    assert updater.scaling.components.policy.start_scale == 2.0
    assert updater.update().retries > 0
    assert updater.scale == calibrated


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("storage", [None, "float16"])
@pytest.mark.filterwarnings("ignore::nnabla_adaloss.LossScaleWarning")
def test_gradients_that_are_zero_are_told_while_scales_are_held(storage: Any, hooked: bool) -> None:
    factor = constant(np.ones((1, 1)))
    loss = F.mean(PF.affine(constant(np.ones((4, 3))), 2, name="a") * factor) + 1.0
    hook = (lambda f: None) if hooked else None
    updater = AdaptiveLossScalingUpdater(solver_of(), loss, storage=storage, function_post_hook=hook)
    reasons = []
    for value in (1.0, 1.0, 0.0, 1.0):
        factor.d = value
        reasons.append(updater.update().reason)
    assert updater.scaling.can_measure_more
    assert (updater.scaling.result.kind == "hookless") == (not hooked)
    assert reasons == ["updated", "updated", "zero_gradients", "updated"]
