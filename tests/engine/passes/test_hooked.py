# SPDX-License-Identifier: Apache-2.0
"""What a pass with hooks does to scales and arrays, and what those see who are called during it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Optional

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling, Method, Needs
from nnabla_adaloss.core.methods import Range
from nnabla_adaloss.engine.passes.backward_pass import NO_HOOKS, UserHooks
from tests.engine.settled import settle

FLOAT16_MAX = 65504.0


def layers(count: int) -> nn.Variable:
    nn.clear_parameters()
    rng = np.random.RandomState(0)
    h = nn.Variable.from_numpy_array(rng.randn(4, 5).astype(np.float32))
    for index in range(count):
        h = F.tanh(PF.affine(h, 6, name=f"layer{index}", rng=rng))
    return h


@dataclass(frozen=True)
class Says(Method):
    """Asks for the same scale whatever it sees."""

    needs = Needs.STATISTICS
    alpha: float

    def scale(self, g: Any, W: Any, *, range: Range, fan_in: float) -> float:
        return self.alpha


def wants(scale: float, **options: Any) -> AdaLossConfig:
    return AdaLossConfig(Says(scale), **options)


class CommunicatingLoss:
    """A loss that looks at parameter gradients where nnabla's communicators do: after each function."""

    def __init__(self, variable: nn.Variable) -> None:
        self.variable = variable
        self.seen: List[Dict[str, np.ndarray]] = []

    def forward(self, *args: Any, **kwargs: Any) -> None:
        self.variable.forward(*args, **kwargs)

    def backward(
        self,
        scale: float,
        clear_buffer: bool,
        communicator_callbacks: Any,
        pre: Any,
        post: Optional[Any],
        *,
        grad: Any,
    ) -> None:
        assert communicator_callbacks is not None

        def exchange(f: Any) -> None:
            if post is not None:
                post(f)
            self.seen.append({name: v.g.copy() for name, v in nn.get_parameters().items()})

        self.variable.backward(
            scale, clear_buffer=clear_buffer, function_pre_hook=pre, function_post_hook=exchange
        )


def test_a_communicator_meets_unscaled_gradients() -> None:
    variable = F.mean(layers(3) ** 2)
    variable.forward()
    for parameter in nn.get_parameters().values():
        parameter.grad.zero()
    variable.backward()
    expected = {name: v.g.copy() for name, v in nn.get_parameters().items()}
    loss = CommunicatingLoss(variable)
    config = wants(4.0, use_bound=False)
    for parameter in nn.get_parameters().values():
        parameter.grad.zero()
    AdaptiveLossScaling(loss, config).backward(8.0, communicator_callbacks=object())
    assert len(loss.seen) > 3
    for gradients in loss.seen:
        for name, g in gradients.items():
            assert not g.any() or np.array_equal(g, expected[name]), name


def test_bounds_do_not_count_what_makes_up_for_a_small_loss() -> None:
    alphas, start_scale = [], 8.0
    for weight in (1.0, 2.0**-20):
        scaling = AdaptiveLossScaling(F.mean(layers(3) ** 2) * weight, wants(16.0))
        settle(scaling, 0, start_scale)
        alphas.append(scaling.layer_scales)
    assert alphas[0] == alphas[1]
    # accum_upper_bound: 8 * 16 * 8 = 1024, and the third layer is the input's, which needs no scale.
    assert list(alphas[0].values()) == [16.0, 8.0]


@pytest.mark.parametrize("largest", [3.0, 4096.0, 60000.0])
def test_a_scaled_weight_stays_within_float16(largest: float) -> None:
    loss = F.mean(layers(2)) * 1e-6
    weight = nn.get_parameters()["layer1/affine/W"]
    data = weight.d.copy()
    data[0, 0] = largest
    weight.d = data
    scaling = AdaptiveLossScaling(loss, wants(1024.0, use_bound=False))
    settle(scaling, 0, 1.0)
    alpha = scaling.layer_scales["layer1/affine"]
    assert alpha * largest <= FLOAT16_MAX
    assert alpha == 1024.0 or 2.0 * alpha * largest > FLOAT16_MAX


@pytest.mark.parametrize("large", ["first", "second"])
def test_where_branches_meet_a_scaled_weight_stays_within_float16(large: str) -> None:
    h = layers(1)
    first, second = (PF.affine(h, 3, name=name) for name in ("first", "second"))
    weight = nn.get_parameters()[f"{large}/affine/W"]
    data = weight.d.copy()
    data[0, 0] = 60000.0
    weight.d = data
    config = wants(1024.0, use_bound=False)
    scaling = AdaptiveLossScaling((F.mean(first) + F.mean(second)) * 1e-6, config)
    settle(scaling, 0, 1.0)
    assert set(scaling.layer_scales) == {"first/affine", "second/affine"}
    assert scaling.layer_scales[f"{large}/affine"] * 60000.0 <= FLOAT16_MAX


def test_after_a_function_that_wants_unscaled_gradients_the_global_scale_is_back() -> None:
    h = layers(2)
    clipped = F.clip_grad_by_norm(h, 0.02)
    loss = F.sum(PF.affine(clipped, 2, name="last") ** 2)
    scaling = AdaptiveLossScaling(loss)
    scaling.forward()
    scaling.backward(1024.0)
    assert scaling.scale_of(clipped) == 1.0
    assert scaling.scale_of(h) == 1024.0


@pytest.mark.parametrize("wanted", [1.0, 16.0])
def test_branches_that_meet_carry_one_scale_and_nothing_is_brought_to_another(wanted: float) -> None:
    h = layers(1)
    branch = F.tanh(PF.affine(h, 5, name="inner"))
    joined = h + PF.affine(branch, 6, name="outer")
    first, second = F.split(F.reshape(joined, (4, 2, 3), inplace=False), axis=1)
    narrow, other = PF.affine(first, 3, name="narrow"), PF.affine(F.tanh(second), 3, name="other")
    config = wants(wanted, use_bound=False)
    scaling = AdaptiveLossScaling(F.sum(narrow + other), config)
    settle(scaling, 0, 8.0)
    assert scaling.scale_of(h) == scaling.scale_of(joined) == scaling.scale_of(second)
    assert scaling.scale_of(joined) == wanted * scaling.scale_of(narrow)
    assert scaling.scale_of(branch) == wanted * scaling.scale_of(joined)
    assert not any(step.before or step.after for step in scaling.result.schedule.steps.values())


@pytest.mark.parametrize("measure_every", [1, 4])
def test_activations_that_are_computed_again_read_weights_as_they_are(measure_every: int) -> None:
    # nnabla computes them before it calls a hook; here with the weight that was scaled last.
    x = nn.Variable.from_numpy_array(np.random.default_rng(0).standard_normal((4, 5)).astype(np.float32))
    with nn.recompute():
        h = F.tanh(PF.affine(PF.affine(x, 5, name="first"), 5, name="shared"))
    loss = F.mean(PF.affine(PF.affine(h, 5, name="between"), 5, name="shared") ** 2)
    parameters = nn.get_parameters()
    expected = {}
    loss.forward(clear_no_need_grad=True)
    for v in parameters.values():
        v.grad.zero()
    loss.backward(clear_buffer=True)
    for name, v in parameters.items():
        expected[name] = v.g.copy()
    config = wants(16.0, use_bound=False, measure_every=measure_every)
    scaling = AdaptiveLossScaling(loss, config)
    for iteration in range(3):
        settle(scaling, iteration, 1.0)
        assert set(scaling.layer_scales.values()) == {16.0}
        for name, v in parameters.items():
            np.testing.assert_array_equal(v.g, expected[name], err_msg=name)


def called(*_: Any) -> None:
    pass


@pytest.mark.any_context
@pytest.mark.parametrize(
    ("hooks", "take_gradients"),
    [
        (NO_HOOKS, False),
        (UserHooks(pre_hook=called), False),
        (UserHooks(post_hook=called), True),
        (UserHooks(callbacks=called), True),
    ],
)
def test_who_takes_gradients(hooks: UserHooks, take_gradients: bool) -> None:
    assert hooks.take_gradients == take_gradients


def gradients() -> Dict[str, np.ndarray]:
    return {name: v.g.copy() for name, v in nn.get_parameters().items()}


@pytest.mark.any_context
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("method", ["approx_range", "amax_history"])
def test_a_post_hook_meets_unscaled_gradients_in_every_pass(method: str, delay: int) -> None:
    x = nn.Variable.from_numpy_array(np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32))
    h = F.tanh(PF.affine(x, 8, name="a"))
    loss = F.mean(PF.affine(F.tanh(PF.affine(h, 5, name="b")), 3, name="c") ** 2)
    parameters = nn.get_parameters().values()

    def zero() -> None:
        for parameter in parameters:
            parameter.grad.zero()

    zero()
    loss.forward()
    loss.backward()
    expected = gradients()
    scaling = AdaptiveLossScaling(loss, AdaLossConfig(loss_scale_method=method, delay=delay))
    for _ in range(4):  # chosen as it runs, and before
        seen: List[Dict[str, np.ndarray]] = []
        zero()
        scaling.forward()
        scaling.backward(function_post_hook=lambda f, seen=seen: seen.append(gradients()))
        assert scaling.loss_scale > 1.0
        for found in seen:
            for name, g in found.items():
                assert not g.any() or np.array_equal(g, expected[name]), name
        assert all(g.any() for g in seen[-1].values())
