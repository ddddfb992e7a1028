# SPDX-License-Identifier: Apache-2.0
"""What a pass with hooks does to scales and arrays, and what those see who are called during it."""

from __future__ import annotations

from typing import Any, Dict, List, Optional

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling
from nnabla_adaloss.engine.passes.backward_pass import NO_HOOKS, UserHooks

FLOAT16_MAX = 65504.0


def layers(count: int) -> nn.Variable:
    nn.clear_parameters()
    rng = np.random.RandomState(0)
    h = nn.Variable.from_numpy_array(rng.randn(4, 5).astype(np.float32))
    for index in range(count):
        h = F.tanh(PF.affine(h, 6, name=f"layer{index}", rng=rng))
    return h


def wants(scale: float) -> Any:
    """A method that asks for ``scale`` whatever it sees."""

    def method(g: Any, W: Any, **_: Any) -> float:
        return scale

    return method


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
    config = AdaLossConfig(loss_scale_method="fixed", fixed_loss_scale=4.0, use_bound=False)
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
        scaling = AdaptiveLossScaling(
            F.mean(layers(3) ** 2) * weight, AdaLossConfig(loss_scale_method=wants(16.0))
        )
        scaling.forward()
        scaling.backward(start_scale)
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
    config = AdaLossConfig(loss_scale_method=wants(1024.0), use_bound=False)
    scaling = AdaptiveLossScaling(loss, config)
    scaling.forward()
    scaling.backward(1.0)
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
    config = AdaLossConfig(loss_scale_method=wants(1024.0), use_bound=False)
    scaling = AdaptiveLossScaling((F.mean(first) + F.mean(second)) * 1e-6, config)
    scaling.forward()
    scaling.backward(1.0)
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


@pytest.mark.parametrize(("wanted", "matched"), [(1.0, 0), (16.0, 1)])
def test_gradients_that_are_brought_to_the_scale_of_another_branch_are_counted(
    wanted: float, matched: int
) -> None:
    h = layers(1)
    config = AdaLossConfig(loss_scale_method=wants(wanted))
    scaling = AdaptiveLossScaling(F.mean(h + PF.affine(h, 6, name="branch")), config)
    assert scaling.matched == 0
    for _ in range(2):
        scaling.forward()
        scaling.backward(8.0)
        assert scaling.matched == matched


def test_outputs_that_are_brought_to_one_scale_are_counted() -> None:
    first, second = F.split(layers(1), axis=1)[:2]
    narrow = PF.affine(F.reshape(first, (4, 1)), 3, name="narrow")
    config = AdaLossConfig(loss_scale_method=wants(16.0))
    scaling = AdaptiveLossScaling(F.sum(narrow) + F.sum(second), config)
    scaling.forward()
    scaling.backward(8.0)
    assert scaling.matched == 1


def test_components_need_no_matching_once_they_are_measured() -> None:
    h = layers(2)
    h = h + 1e-3 * PF.affine(h, 6, name="branch")
    config = AdaLossConfig(loss_scale_method="amax_history")
    scaling = AdaptiveLossScaling(F.mean(PF.affine(h, 6, name="last") ** 2), config)
    matched = []
    for _ in range(4):
        scaling.forward()
        scaling.backward()
        matched.append(scaling.matched)
    assert matched[1:] == [0, 0, 0]


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
    config = AdaLossConfig(loss_scale_method=wants(16.0), use_bound=False, measure_every=measure_every)
    scaling = AdaptiveLossScaling(loss, config)
    for _ in range(3):
        for v in parameters.values():
            v.grad.zero()
        scaling.forward(clear_no_need_grad=True)
        scaling.backward(1.0, clear_buffer=True)
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
