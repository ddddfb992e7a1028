# SPDX-License-Identifier: Apache-2.0
"""Who is called while backward runs, and what gradients look like by then."""

from __future__ import annotations

from typing import Any, Dict, List

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, AdaptiveLossScaling
from nnabla_adaloss.engine.onlookers import NOBODY, Onlookers

pytestmark = pytest.mark.any_context


def called(*_: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("onlookers", "present", "take_gradients"),
    [
        (NOBODY, False, False),
        (Onlookers(pre_hook=called), True, False),
        (Onlookers(post_hook=called), True, True),
        (Onlookers(callbacks=called), True, True),
    ],
)
def test_who_takes_gradients(onlookers: Onlookers, present: bool, take_gradients: bool) -> None:
    assert (onlookers.present, onlookers.take_gradients) == (present, take_gradients)


def gradients() -> Dict[str, np.ndarray]:
    return {name: v.g.copy() for name, v in nn.get_parameters().items()}


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
    for _ in range(4):  # measured, and held
        seen: List[Dict[str, np.ndarray]] = []
        zero()
        scaling.forward()
        scaling.backward(function_post_hook=lambda f, seen=seen: seen.append(gradients()))
        assert scaling.loss_scale > 1.0
        for found in seen:
            for name, g in found.items():
                assert not g.any() or np.array_equal(g, expected[name]), name
        assert all(g.any() for g in seen[-1].values())
