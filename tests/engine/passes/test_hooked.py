# SPDX-License-Identifier: Apache-2.0
"""What a pass with hooks does to scales and arrays, and what those see who are called during it."""

from __future__ import annotations

from typing import Any, List

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling
from tests.worlds.methods import Says
from tests.worlds.networks import layers, mlp
from tests.worlds.passes import Noting, run, settle
from tests.worlds.values import Values, assert_equal, data, gradients, zero_grads


def wants(scale: float, **options: Any) -> AdaLossConfig:
    return AdaLossConfig(Says(scale), **options)


def test_a_communicator_meets_unscaled_gradients() -> None:
    variable = F.mean(layers(6, 6, 6) ** 2)
    expected = run(variable)
    seen: List[Values] = []
    loss, callbacks = Noting(variable, lambda: seen.append(gradients())), object()
    zero_grads()
    AdaptiveLossScaling(loss, wants(4.0, use_bound=False)).backward(8.0, communicator_callbacks=callbacks)
    assert loss.callbacks is callbacks
    assert len(seen) > 3
    assert_unscaled(seen, expected)


def assert_unscaled(seen: List[Values], expected: Values) -> None:
    for found in seen:
        for name, g in found.items():
            assert not g.any() or np.array_equal(g, expected[name]), name


def test_the_global_scale_is_back_after_a_function_that_wants_unscaled_gradients() -> None:
    h = layers(6, 6)
    clipped = F.clip_grad_by_norm(h, 0.02)
    loss = F.sum(PF.affine(clipped, 2, name="last") ** 2)
    scaling = AdaptiveLossScaling(loss)
    scaling.forward()
    scaling.backward(1024.0)
    assert scaling.scale_of(clipped) == 1.0
    assert scaling.scale_of(h) == 1024.0


def test_a_leaf_of_a_layer_that_wants_unscaled_gradients_has_none_either() -> None:
    x = data(2, 3)
    x.need_grad = True
    loss = F.sum(PF.affine(F.tanh(PF.affine(x, 3, name="first")), 2, name="last"))
    scaling = AdaptiveLossScaling(loss, non_homogeneous=["Affine"])
    run(scaling, 1024.0)
    assert scaling.scale_of(x) == 1.0


@pytest.mark.parametrize("measure_every", [1, 4])
def test_activations_that_are_computed_again_read_weights_as_they_are(measure_every: int) -> None:
    # nnabla computes them before it calls a hook; here with the weight that was scaled last.
    x = data(4, 5)
    with nn.recompute():
        h = F.tanh(PF.affine(PF.affine(x, 5, name="first"), 5, name="shared"))
    loss = F.mean(PF.affine(PF.affine(h, 5, name="between"), 5, name="shared") ** 2)
    expected = run(loss, clear=True)
    config = wants(16.0, use_bound=False, measure_every=measure_every)
    scaling = AdaptiveLossScaling(loss, config)
    for iteration in range(3):
        settle(scaling, iteration, 1.0)
        assert set(scaling.layer_scales.values()) == {16.0}
        assert_equal(gradients(), expected)


@pytest.mark.any_context
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("method", ["approx_range", "amax_history"])
def test_a_post_hook_meets_unscaled_gradients_in_every_pass(method: str, delay: int) -> None:
    loss = mlp()
    expected = run(loss)
    scaling = AdaptiveLossScaling(loss, AdaLossConfig(loss_scale_method=method, delay=delay))
    for _ in range(4):  # chosen as it runs, and before
        seen: List[Values] = []
        run(scaling, function_post_hook=lambda f, seen=seen: seen.append(gradients()))
        assert scaling.loss_scale > 1.0
        assert_unscaled(seen, expected)
        assert all(g.any() for g in seen[-1].values())


def test_a_readable_gradient_that_a_hook_has_freed_gets_no_memory_again() -> None:
    h = layers(6, 6)
    h.persistent = True
    scaling = AdaptiveLossScaling(F.sum(PF.affine(h, 2, name="last") ** 2))

    def free(f: Any) -> None:
        if h in f.outputs:
            h.grad.clear()

    scaling.forward()
    scaling.backward(1024.0, clear_buffer=True, function_post_hook=free)
    assert scaling.scale_of(h) != 1.0
    assert h.grad.clear_called


def test_an_input_that_gets_no_gradient_from_a_function_that_wants_unscaled_ones_stays_at_zero() -> None:
    h = layers(6, 6)
    condition = F.relu(PF.affine(h, 6, name="condition"))  # F.where writes no gradient of it
    loss = F.sum(PF.affine(F.where(condition, h, F.tanh(h)), 2, name="last") ** 2)
    expected = run(loss)
    scaling = AdaptiveLossScaling(loss, non_homogeneous=["Where"])
    for _ in range(2):  # with hooks, then without
        run(scaling, 1024.0)
        assert_equal(gradients(), expected)
