# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import nnabla as nn
import pytest
from underflow import UnderflowProbe

from nnabla_adaloss import AdaptiveLossScaling, FormatEmulation
from tests.worlds.networks import two_layers
from tests.worlds.values import data


@pytest.fixture
def loss() -> nn.Variable:
    return two_layers(data(4, 3))


def test_layers_and_elements_are_those_of_the_network(loss: nn.Variable) -> None:
    probe = UnderflowProbe(loss)
    assert list(probe.outputs) == ["a", "b"]
    counts = probe.measure(FormatEmulation(loss), 1024.0)
    # Affine and tanh outputs, weight and bias; the square behind the last layer belongs to the loss.
    assert counts["a"] == (2 * 4 * 5 + 3 * 5 + 5, 0)
    assert counts["b"] == (4 * 2 + 5 * 2 + 2, 0)
    # Behind a layer that is all zero no rounding has anything left to flush.
    counts = probe.measure(FormatEmulation(loss), 2.0**-40)
    assert [c.share for c in counts.values()] == [1.0, 1.0]


def test_adaptive_scaling_is_probed_through_its_own_backward_and_learns_nothing(loss: nn.Variable) -> None:
    scaling = AdaptiveLossScaling(FormatEmulation(loss))
    scaling.forward()
    scaling.backward()
    scaling.after_update()
    before = scaling.state_dict()
    counts = UnderflowProbe(loss).measure(scaling, 8.0)
    assert [c.lost for c in counts.values()] == [0, 0]
    assert set(scaling.layer_scales) == {"b/affine"}
    assert scaling.state_dict() == before
