# SPDX-License-Identifier: Apache-2.0
"""nnabla's own training loops around a loss whose gradients come out unscaled."""

from __future__ import annotations

from typing import Any, Callable, Dict, Type

import nnabla as nn
import numpy as np
import pytest
from nnabla.experimental.framework.updater import Updater
from nnabla.experimental.mixed_precision_training import DynamicLossScalingUpdater

from nnabla_adaloss import AdaptiveLossScaling, AdaptiveLossScalingUpdater, FormatEmulation
from tests.updaters.networks import Training, snapshot, training

Wrap = Callable[[nn.Variable], Any]


class WithSchedule(DynamicLossScalingUpdater):  # type: ignore[misc]
    """One that does something around nnabla's loop."""

    def update(self) -> None:
        self.solver.set_learning_rate(0.05)
        super().update()


class WithoutDivision(DynamicLossScalingUpdater):  # type: ignore[misc]
    """One with a loop of its own, made for gradients that come out unscaled."""

    def update(self) -> None:
        self.solver.zero_grad()
        self.data_feeder()
        self.loss.forward(clear_no_need_grad=self.clear_buffer)
        self.loss.backward(self.scale, clear_buffer=self.clear_buffer)
        self.solver.update()


def emulated(loss: nn.Variable) -> AdaptiveLossScaling:
    return AdaptiveLossScaling(FormatEmulation(loss, "float16"))


def steps(train: Training, update: Callable[[], Any]) -> Dict[str, np.ndarray]:
    before = snapshot(train.parameters)
    update()
    return {name: v.d - before[name] for name, v in train.parameters.items() if v.need_grad}


@pytest.mark.parametrize("made", [DynamicLossScalingUpdater, WithSchedule])
@pytest.mark.parametrize("wrap", [AdaptiveLossScaling, emulated])
def test_nnablas_updater_is_refused_and_no_parameter_changes(wrap: Wrap, made: Type[Any]) -> None:
    train = training()
    scaling = wrap(train.loss)
    scaling.forward()
    scaling.backward(8.0)
    updater = made(train.solver, scaling, train.feed)
    trained = {name: v for name, v in train.parameters.items() if v.need_grad}
    before = snapshot(trained)
    message = (
        f"^{made.__name__} divides gradients by the scale, but its loss is an AdaptiveLossScaling, which "
        "unscales them by itself: .*AdaptiveLossScalingUpdater$"
    )
    for _ in range(2):
        with pytest.raises(TypeError, match=message):
            updater.update()
    for name, value in before.items():
        np.testing.assert_array_equal(trained[name].d, value, err_msg=name)
    # What the sentence says to do.
    assert AdaptiveLossScalingUpdater(train.solver, scaling.loss, train.feed).update().updated


def test_the_same_scale_is_taken_from_loops_that_divide_nothing() -> None:
    train = training()
    expected = steps(train, DynamicLossScalingUpdater(train.solver, train.loss, train.feed).update)
    train = training()
    updater = WithoutDivision(train.solver, AdaptiveLossScaling(train.loss), train.feed)
    found = steps(train, updater.update)
    for name, step in expected.items():
        np.testing.assert_allclose(found[name], step, rtol=1e-4, atol=1e-9, err_msg=name)


def test_within_nnablas_loop_another_loss_may_be_scaled() -> None:
    """As by a data feeder that trains something, too."""
    train = training()
    scaling = AdaptiveLossScaling(train.loss)

    def feed() -> None:
        train.feed()
        scaling.forward()
        scaling.backward(8.0)
        train.solver.zero_grad()

    found = steps(train, DynamicLossScalingUpdater(train.solver, train.loss, feed).update)
    assert all(step.any() for step in found.values())


def test_loops_of_nnabla_that_do_not_scale_are_right() -> None:
    def one_step(wrap: Wrap, **backward: Any) -> Dict[str, np.ndarray]:
        train = training()
        loss = wrap(train.loss)
        updater = Updater(
            lambda i, e, ag: train.feed(),
            lambda i, e: train.solver.zero_grad(),
            lambda i, e: train.solver.update(),
            lambda i, e, ag: loss.forward(clear_no_need_grad=True),
            lambda i, e, ag: loss.backward(clear_buffer=True, **backward),
        )
        return steps(train, lambda: updater.update(0, 0))

    for backward in ({}, {"grad": 0.5}):
        expected = one_step(lambda loss: loss, **backward)
        for name, step in one_step(AdaptiveLossScaling, **backward).items():
            np.testing.assert_allclose(step, expected[name], rtol=1e-4, atol=1e-9, err_msg=name)
