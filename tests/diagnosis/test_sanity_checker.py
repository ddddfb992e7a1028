# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import warnings
from typing import Any, Dict

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, DynamicLossScalingUpdater, LossScaleWarning, SanityChecker
from tests.worlds.interruptions import Interrupt, Moments, Training, differences
from tests.worlds.tampering import Interrupted, Noise
from tests.worlds.trainings import updater_of
from tests.worlds.values import HALF

from .healthy import augmented_images, mlp
from .nets import Built, hidden, network, noisy_net, vanishing_sigmoid


def examined(built: Built, **arguments: Any) -> Any:
    return updater_of(*built, S.Momentum(0.01), **arguments)


def test_a_layer_that_loses_its_gradient_is_named_once() -> None:
    config = AdaLossConfig(loss_scale_method="approx_range")
    updater = examined(vanishing_sigmoid(), config=config)
    checker = SanityChecker(updater, every=2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", LossScaleWarning)
        for _ in range(6):
            updater.update()
            checker()
    assert [str(w.message).split(" loses ")[0] for w in told] == ["layer fc0/affine"]
    assert "in iteration 2" in str(told[0].message)
    lost = checker.last["fc2/affine"]
    assert lost.with_alpha < 0.1 < 0.5 < lost.without_alpha


def test_scales_that_suit_lose_nothing() -> None:
    updater = examined(vanishing_sigmoid())
    checker = SanityChecker(updater, threshold=0.05)
    for _ in range(3):
        updater.update()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = checker.check()
    assert max(lost.with_alpha for lost in found.values()) < 0.05
    assert found["fc0/affine"].without_alpha == 1.0


def test_a_check_that_is_interrupted_at_any_moment_changes_nothing() -> None:
    training = Training().train(3)
    checker, moments = SanityChecker(training.updater), Moments(0)
    # The first time, more happens.
    checker.check()
    moments.run(checker.check)
    before = training.everything()
    # Most closely while what the passes have changed is put back.
    restoring = range(moments.count - 500, moments.count, 11)
    for stop in (*range(1, moments.count, 401), *restoring):
        now = Moments(stop)
        with pytest.raises(Interrupt):
            now.run(checker.check)
        assert not differences(training.everything(), before), now.place


@pytest.mark.parametrize("turn", [1, 2, 3, 4])
def test_a_check_that_is_interrupted_teaches_nothing(turn: int) -> None:
    """In the pass in float32, in the one without scales of layers, and in two with them: one overflows."""
    function = Interrupted()
    rng = np.random.RandomState(0)
    x = nn.Variable.from_numpy_array(rng.randn(4, 5).astype(np.float32))
    h = function(F.tanh(PF.affine(x, 5, name="a", rng=rng)))
    loss = F.mean(PF.affine(h, 3, name="b", rng=rng) ** 2)
    updater = updater_of(loss, lambda: None)
    for _ in range(3):
        updater.update()
    before = updater.state_dict()
    function.left, function.factor = turn, 2.0**20
    with pytest.raises(KeyboardInterrupt):
        SanityChecker(updater).check()
    assert updater.state_dict() == before
    function.factor = 1.0
    assert updater.update().reason == "updated"


def test_layers_behind_functions_with_a_seed_lose_nothing() -> None:
    checker = SanityChecker(examined(augmented_images()), threshold=0.2)
    assert max(lost.with_alpha for lost in checker.check().values()) < 0.2


def test_layers_whose_gradients_no_pass_repeats_are_left_out() -> None:
    noise = Noise(own=True)
    checker = SanityChecker(examined(network(lambda x: noise(hidden(x)))), threshold=0.0)
    assert checker.check() == {}


@pytest.mark.parametrize("method", ["approx_range", "amax_history"])
def test_training_goes_on_as_without(method: str) -> None:
    def train(every: int) -> Dict[str, np.ndarray]:
        nn.clear_parameters()
        nn.seed(1)
        updater = examined(noisy_net(), config=AdaLossConfig(loss_scale_method=method))
        checker = SanityChecker(updater, every=every)
        for _ in range(8):
            updater.update()
            checker()
        assert all(lost.with_alpha < 0.05 for lost in checker.last.values())
        return {name: v.d.copy() for name, v in nn.get_parameters(grad_only=False).items()}

    with_checks, without = train(2), train(100)
    for name, value in without.items():
        np.testing.assert_array_equal(with_checks[name], value, err_msg=name)


def test_refused() -> None:
    updater = examined(mlp())
    with pytest.raises(ValueError, match="every=0 must be 1 or more"):
        SanityChecker(updater, every=0)
    with pytest.raises(ValueError, match=r"threshold=1\.5 must lie in \[0, 1\]"):
        SanityChecker(updater, threshold=1.5)
    loss, feed = mlp()
    with pytest.raises(TypeError, match="must be an AdaptiveLossScalingUpdater, got Dynamic"):
        SanityChecker(DynamicLossScalingUpdater(updater.solver, loss, feed))
    with pytest.raises(ValueError, match="stores everything in fp32"):
        SanityChecker(examined((loss, feed), storage=None, config=AdaLossConfig()))
    with nn.context_scope(HALF):
        loss = F.mean(PF.affine(nn.Variable.from_numpy_array(np.ones((2, 3))), 2, name="fc") ** 2)
    with pytest.raises(ValueError, match="^fc/affine is computed in cpu:half, so there is no fp32"):
        SanityChecker(examined((loss, feed), storage=None, config=AdaLossConfig()))
