# SPDX-License-Identifier: Apache-2.0
"""What can be wrapped, how its backward is run, what that starts from, and what hooks raise in it."""

from __future__ import annotations

import math
from typing import Any, Callable, List, Type

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest
from nnabla.experimental.mixed_precision_training import DynamicLossScalingUpdater

from nnabla_adaloss import AdaptiveLossScaling, AdaptiveLossScalingUpdater, FormatEmulation
from nnabla_adaloss.graph.loss import (
    HookGuard,
    LossSeed,
    LossWrapper,
    check_scale,
    root_cause,
    seed_weight,
    variable_of,
)
from tests.worlds.trainings import Training, training
from tests.worlds.values import Values, assert_close, constant, snapshot


def output() -> nn.Variable:
    return PF.affine(constant(np.ones((2, 3))), 2, name="a")


def test_the_variable_behind_a_loss() -> None:
    loss = F.mean(output())
    emulation = FormatEmulation(loss)
    assert variable_of(loss) is loss
    assert variable_of(emulation) is loss
    assert variable_of(AdaptiveLossScaling(emulation)) is loss
    assert isinstance(emulation, LossWrapper)
    assert isinstance(AdaptiveLossScaling(loss), LossWrapper)


@pytest.mark.parametrize("loss", [None, 3.0, "loss", np.ones(1), nn.NdArray((1,))])
def test_what_is_no_loss(loss: Any) -> None:
    with pytest.raises(TypeError, match=f"loss must be an nnabla.Variable.*{type(loss).__name__}"):
        variable_of(loss)


def test_what_needs_no_gradient() -> None:
    x = nn.Variable((2, 3))
    for loss in (x, F.mean(x), nn.Variable((1,), need_grad=True)):
        with pytest.raises(ValueError, match="needs no gradient"):
            variable_of(loss)


def test_a_loss_that_nnabla_takes_for_one_without_gradient_before_forward() -> None:
    x = nn.Variable((2, 3))
    loss = F.mean(F.tanh(x))
    x.rewire_on(F.tanh(nn.Variable((2, 3), need_grad=True)))
    assert not loss.need_grad
    assert variable_of(loss) is loss


@pytest.mark.parametrize("scale", [1, 8.0, np.float32(2.0), np.int64(4), np.array(0.5), 2.0**-126, 1e308])
def test_scales(scale: Any) -> None:
    found = check_scale(scale)
    assert found == float(scale)
    assert type(found) is float


@pytest.mark.parametrize(
    ("scale", "error"),
    [
        *((scale, ValueError) for scale in (0, -1.0, math.inf, math.nan, np.array(0.0), -0.0, 5e-324)),
        *((scale, TypeError) for scale in (None, "8", True, [8.0], np.array([8.0]), 1j)),
    ],
)
def test_what_is_no_scale(scale: Any, error: Any) -> None:
    with pytest.raises(error, match="factor="):
        check_scale(scale, "factor")


@pytest.mark.parametrize("clear_buffer", [False, True])
def test_one_array_serves_pass_after_pass(clear_buffer: bool) -> None:
    loss = F.mean(output())
    weight = nn.get_parameters()["a/affine/W"]
    own = np.float32(0.25) * np.ones((), np.float32)
    loss.g = own
    seed = LossSeed(loss)
    for scale in (8.0, 2.0**-20, 8.0):
        loss.forward()
        weight.grad.zero()
        filled = seed.gradient(scale)
        assert isinstance(filled, nn.NdArray)
        assert filled.dtype == np.float32
        loss.backward(filled, clear_buffer=clear_buffer)
        np.testing.assert_array_equal(weight.g, np.full((3, 2), 0.5 * scale, np.float32))
    np.testing.assert_array_equal(loss.g, own)  # nnabla has put the loss's own gradient back


class Planned(Exception):
    pass


@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize("error", [Planned("in a hook"), KeyboardInterrupt()])
def test_after_the_first_exception_no_hook_runs_and_the_original_comes_out(
    error: BaseException, returns: bool
) -> None:
    seen: List[Any] = []
    guard = HookGuard(lambda: seen.append("cleaned up"))

    def fail(f: Any) -> None:
        seen.append(f)
        raise error

    first, second = guard.chain(fail, seen.append), guard.chain(None, seen.append)
    assert guard.chain(None, None) is None
    assert first is not None
    assert second is not None

    def call() -> None:
        for hook in (first, second, first):
            hook(1)
        if not returns:
            raise SystemError("nnabla hides the cause")

    with pytest.raises(type(error)) as caught:
        guard.run(call)
    assert caught.value is guard.error is error
    assert seen == [1, "cleaned up"]


def test_root_cause_looks_behind_system_errors_only() -> None:
    error, outer = Planned(), SystemError()
    outer.__cause__ = SystemError()
    outer.__cause__.__cause__ = error
    assert root_cause(outer) is error
    assert root_cause(error) is error
    error.__cause__ = ValueError()
    assert root_cause(outer) is error
    alone = SystemError()
    assert root_cause(alone) is alone


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


def steps(train: Training, update: Callable[[], Any]) -> Values:
    trained = {name: v for name, v in train.parameters.items() if v.need_grad}
    before = snapshot(trained)
    update()
    return {name: v.d - before[name] for name, v in trained.items()}


@pytest.mark.parametrize(("storage", "made"), [(None, WithSchedule), ("float16", DynamicLossScalingUpdater)])
def test_nnablas_updater_is_refused_and_no_parameter_changes(storage: Any, made: Type[Any]) -> None:
    train = training()
    scaling = AdaptiveLossScaling(train.loss if storage is None else FormatEmulation(train.loss, storage))
    scaling.forward()
    scaling.backward(8.0)
    updater = made(train.solver, scaling, train.feed)
    message = (
        f"^{made.__name__} divides gradients .* is an AdaptiveLossScaling, .*AdaptiveLossScalingUpdater$"
    )

    def update() -> None:
        with pytest.raises(TypeError, match=message):
            updater.update()

    for _ in range(2):
        assert not any(step.any() for step in steps(train, update).values())
    # What the sentence says to do.
    assert AdaptiveLossScalingUpdater(train.solver, scaling.loss, train.feed).update().updated


def test_the_same_scale_is_taken_from_loops_that_divide_nothing_of_it() -> None:
    train = training()

    def feed() -> None:
        """Something else is trained within nnabla's loop, too."""
        train.feed()
        other.forward()
        other.backward(8.0)
        train.solver.zero_grad()

    other = AdaptiveLossScaling(train.loss)
    expected = steps(train, DynamicLossScalingUpdater(train.solver, train.loss, feed).update)
    train = training()
    updater = WithoutDivision(train.solver, AdaptiveLossScaling(train.loss), train.feed)
    assert_close(steps(train, updater.update), expected, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize(
    ("seed", "weight"),
    [(np.array([0.5, -3.0]), 2.0), ([1e-9], 2.0**-30), (0.75, 0.5)]
    + [(np.array(values), 1.0) for values in ([0.0, -0.0], [np.inf, 1.0], [np.nan, 1.0], [])],
)
def test_the_weight_of_a_seed_gradient(seed: Any, weight: float) -> None:
    assert seed_weight(seed, on_host=True) == weight
    array = nn.NdArray.from_numpy_array(np.atleast_1d(seed))
    assert seed_weight(array, on_host=True) == weight
    # It would have to be fetched.
    assert seed_weight(array, on_host=False) == 1.0
