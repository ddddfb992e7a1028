# SPDX-License-Identifier: Apache-2.0
"""The plan: order, roles, names and fan-ins."""

from __future__ import annotations

from typing import List

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
from hypothesis import HealthCheck, given, settings

from nnabla_adaloss import AdaptiveLossScaling
from nnabla_adaloss.graph.plan import GraphPlan
from tests.worlds.random_graphs import Network, networks


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(networks)
def test_the_order_is_nnablas(network: Network) -> None:
    seen: List[int] = []
    network.loss.forward()
    network.loss.backward(function_pre_hook=lambda f: seen.append(hash(f)))
    assert list(GraphPlan(network.loss).nodes) == seen


def residual() -> nn.Variable:
    nn.clear_parameters()
    x = nn.Variable((2, 3, 8, 8))
    h = F.relu(PF.convolution(x, 4, (3, 3), pad=(1, 1), stride=(2, 2), name="stem"))
    h = h + PF.convolution(h, 4, (3, 3), pad=(1, 1), group=2, name="block")
    with nn.parameter_scope("head"):
        y = PF.affine(h, 5, name="fc")
    labels = F.constant(0, (2, 1))
    return F.mean(F.softmax_cross_entropy(y, labels)) * 0.5


def rows(plan: GraphPlan) -> List[List[str]]:
    return [
        [cell.strip() for cell in line.split("  ") if cell.strip()] for line in str(plan).splitlines()[2:]
    ]


def test_the_table_tells_roles_layers_and_fan_ins() -> None:
    table = rows(AdaptiveLossScaling(residual()).plan)
    assert table == [
        ["MulScalar", "passed through (loss)"],
        ["Mean", "passed through (loss)"],
        ["SoftmaxCrossEntropy", "passed through (loss)"],
        ["Affine", "scaled", "head/fc/affine", "5", "64x5"],
        ["Add2", "passed through"],
        ["Convolution", "scaled", "block/conv", "18", "4x2x3x3"],
        ["ReLU", "passed through, fan-out"],
        ["Convolution", "passed through", "stem/conv"],
        ["Constant", "stop"],
    ]
