# SPDX-License-Identifier: Apache-2.0
"""Scaling functions without a tracker."""

from __future__ import annotations

from typing import List

import nnabla as nn
import nnabla.functions as F
import numpy as np
import pytest

from nnabla_adaloss import AdaLossConfig, LayerRecord, get_loss_scale
from nnabla_adaloss.functions import adaptive_loss_scaling, branch

pytestmark = pytest.mark.any_context


def leaf(*shape: int, scale: float = 1.0) -> nn.Variable:
    value = np.random.default_rng(len(shape)).standard_normal(shape) * scale
    return nn.Variable.from_numpy_array(value.astype(np.float32), need_grad=True)


@pytest.mark.parametrize("layer", ["affine", "convolution", "none"])
def test_the_gradient_is_multiplied_by_alpha(layer: str) -> None:
    records: List[LayerRecord] = []
    config = AdaLossConfig(recorder=records.append)
    if layer == "convolution":
        x, w = leaf(2, 3, 8, 8), leaf(4, 3, 3, 3)
        h, fan_in = F.convolution(x, w), 36
    elif layer == "affine":
        x, w = leaf(4, 3), leaf(3, 5)
        h, fan_in = F.affine(x, w), 5
    else:
        x, w = leaf(4, 5), leaf(3, 5)
        h, fan_in = F.tanh(x), 5
    y = adaptive_loss_scaling(h, w, config)
    g = (np.random.default_rng(0).standard_normal(y.shape) * 1e-6).astype(np.float32)
    y.forward()
    np.testing.assert_array_equal(y.d, h.d)
    y.backward(g)
    alpha = float(get_loss_scale(g, w.d, config=AdaLossConfig(), fan_in=fan_in))
    assert alpha > 1.0
    np.testing.assert_array_equal(h.g, np.float32(alpha) * g)
    assert [r.alpha for r in records] == [alpha]


def test_branches_without_a_tracker_are_added() -> None:
    x = leaf(3)
    a, b = branch(x, 2)
    loss = F.sum(a * 2.0) + F.sum(b * 3.0)
    loss.forward()
    x.g = 1.0
    loss.backward()
    np.testing.assert_array_equal(x.g, np.full(3, 6.0, np.float32))


def test_anything_else_in_place_of_a_configuration_is_refused() -> None:
    with pytest.raises(TypeError, match="config must be a ScaleTracker or an AdaLossConfig"):
        adaptive_loss_scaling(leaf(3, 2), leaf(2, 2), "approx_range")  # type: ignore[arg-type]
