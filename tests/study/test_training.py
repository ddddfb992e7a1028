# SPDX-License-Identifier: Apache-2.0
"""Every network trains in every storage, and what happens is counted."""

from __future__ import annotations

from typing import Any, List

import pytest
from scaling_study.methods import METHODS, REFERENCE, STORAGES
from scaling_study.nets import NETS
from scaling_study.training import Run, Trainee, train, work

SLOW = ("conv12", "detector", "resnet20", "rnn64", "transformer")
NETS_BY_SPEED = [pytest.param(net, marks=pytest.mark.slow) if net in SLOW else net for net in NETS]


@pytest.mark.parametrize("storage", [name for name in STORAGES if name != "e4m3_stored"])
@pytest.mark.parametrize("net", NETS_BY_SPEED)
def test_every_network_trains_in_every_storage(net: str, storage: str) -> None:
    result = train(Run(net, storage, 1e-6, "amax_history", 0, 2))
    assert result.error == ""
    assert result.score is not None
    assert result.lost == 0
    assert result.batches == (4 if net == "gan" else 2)


@pytest.mark.parametrize("method", [*METHODS, REFERENCE])
def test_every_method_trains(method: str) -> None:
    line = work(Run("lenet", "float16", 1.0, method, 0, 2))
    assert line["error"] == ""
    assert line["batches"] == 2
    assert line["method"] == method


def test_the_loss_weight_does_not_change_what_fp32_learns() -> None:
    one, small = (train(Run("mlp8", "float32", weight, REFERENCE, 0, 20)).score for weight in (1.0, 2.0**-20))
    assert one == small


def test_batches_that_overflow_are_counted_as_lost() -> None:
    # Each time the scale is halved, until the fp16 gradients have room: far more than one batch.
    result = train(Run("lenet", "float16", 2.0**14, "dynamic_65536", 0, 30))
    assert result.lost == result.overflows > 1
    assert result.repeats == 0


def test_repeats_are_no_lost_batches() -> None:
    scales: List[Any] = []

    def watch(trainee: Trainee) -> None:
        scales.append(trainee.loop.updater.scale)
        if len(scales) == 1:
            trainee.loop.updater.scale = 2.0**40

    result = train(Run("lenet", "float16", 1.0, "approx_range", 0, 3), watch=watch)
    assert result.overflows > 0
    assert result.repeats >= result.overflows
    assert result.lost == 0


def test_gradients_that_are_all_zero_count_as_underflow() -> None:
    assert train(Run("mlp8", "float16", 1e-9, "none", 0, 20)).underflow > 0.99


def test_a_training_that_ends_with_an_error_has_no_score() -> None:
    def watch(trainee: Trainee) -> None:
        raise RuntimeError("enough")

    result = train(Run("lenet", "float16", 1.0, "none", 0, 2), watch=watch)
    assert result.score is None
    assert result.error == "RuntimeError: enough"
