# SPDX-License-Identifier: Apache-2.0
"""Every network trains with every method, and what happens is counted."""

from __future__ import annotations

from typing import Any

import nnabla as nn
import pytest
from scaling_study.apart import IN_EIGHT_BITS
from scaling_study.methods import METHODS, REFERENCE, Loop, Trainee, adaptive, without_monitors
from scaling_study.nets import FAR_APART, NETS
from scaling_study.training import Result, Run, train

from nnabla_adaloss import DynamicLossScalingUpdater

SLOW = ("conv12", "detector", "resnet20", "rnn64", "transformer", "residual", "coefficient", "auxiliary")
ALL = {**NETS, **FAR_APART}


def trained(net: str, storage: str, weight: float, method: str, iterations: int) -> Result:
    return train(Run(net, storage, weight, method, 0, iterations), ALL[net])


@pytest.mark.parametrize("net", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in ALL])
def test_every_network_trains_as_in_fp32(net: str) -> None:
    fp32 = trained(net, "float32", 1.0, REFERENCE, 2)
    for storage in ("float16", *IN_EIGHT_BITS.get(net, ("fp8_hybrid",) if net in NETS else ())):
        result = trained(net, storage, 1.0, "amax_history", 2)
        assert result.error == ""
        assert result.score == pytest.approx(fp32.score, abs=0.2)
        assert result.lost == 0
        assert result.batches == (4 if net == "gan" else 2)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns(method: str) -> None:
    result = trained("mlp8", "float16", 1.0, method, 60)
    assert result.error == ""
    assert result.score is not None
    assert result.score > 0.3
    assert result.lost <= 1
    assert result.overflows == result.lost
    assert result.batches == 60


def test_the_loss_weight_does_not_change_training_in_fp32() -> None:
    one, small = (trained("mlp8", "float32", weight, REFERENCE, 20).score for weight in (1.0, 2.0**-20))
    assert one == small


def test_batches_that_nnablas_updater_throws_away_are_counted() -> None:
    # 2^40 has to be halved until it fits.
    method = without_monitors(DynamicLossScalingUpdater, scale=2.0**40)
    result = train(Run("mlp8", "float16", 1.0, "", 0, 40), ALL["mlp8"], method)
    assert result.batches == 40
    assert 10 < result.lost == result.overflows < 30


def test_repeats_are_no_lost_batches() -> None:
    # The last batch before the loss jumps by 2^10 is the second.
    def method(trainee: Trainee, storage: Any) -> Loop:
        factor = nn.Variable(())
        feed = trainee.feed

        def jump() -> None:
            feed()
            factor.d = 1.0 if trainee.fed < 3 else 2.0**10

        trainee.loss, trainee.feed = trainee.loss * factor, jump  # type: ignore[method-assign]
        return adaptive()(trainee, storage)

    result = train(Run("lenet", "float16", 2.0**-10, "", 0, 4), ALL["lenet"], method)
    assert result.repeats >= result.overflows > 0
    assert result.lost == 0


def test_gradients_that_are_all_zero_count_as_underflow() -> None:
    assert trained("mlp8", "float16", 1e-9, "none", 20).underflow > 0.99


def test_a_training_that_ends_with_an_error_has_no_score() -> None:
    def method(trainee: Trainee, storage: Any) -> Loop:
        raise RuntimeError("enough")

    result = train(Run("lenet", "float16", 1.0, "", 0, 2), ALL["lenet"], method)
    assert result.score is None
    assert result.error == "RuntimeError: enough"
