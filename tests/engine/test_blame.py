# SPDX-License-Identifier: Apache-2.0
"""Which layer's own scale made a gradient overflow: the nearest one towards the loss that raised it."""

from __future__ import annotations

from typing import Dict, Optional

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import pytest

from nnabla_adaloss.engine.blame import layer_to_blame
from nnabla_adaloss.graph.plan import GraphPlan

pytestmark = pytest.mark.any_context


def chain() -> nn.Variable:
    h = nn.Variable((2, 3))
    for name in "abcd":
        h = F.tanh(PF.affine(h, 3, name=name))
    return F.mean(h)


def branches() -> nn.Variable:
    """``stem`` feeds ``left`` and ``right``, and a shortcut without a layer."""
    h = F.tanh(PF.affine(nn.Variable((2, 3)), 3, name="stem"))
    left, right = PF.affine(h, 3, name="left"), PF.affine(F.tanh(h), 3, name="right")
    return F.mean(PF.affine(left + right + h, 3, name="head"))


@pytest.mark.parametrize(
    ("label", "scales", "expected"),
    [
        ("a/affine", {"b/affine": 4.0, "c/affine": 2.0}, "b/affine"),
        ("a/affine", {"b/affine": 1.0, "c/affine": 2.0}, "c/affine"),
        ("a/affine", {"d/affine": 2.0}, "d/affine"),
        ("a/affine", {"b/affine": 1.0, "c/affine": 0.5}, None),
        ("a/affine", {}, None),
        # A layer's own scale is on its input gradient, and not on what arrives.
        ("b/affine", {"b/affine": 16.0}, None),
        ("b/affine", {"a/affine": 16.0}, None),
        ("d/affine", {"a/affine": 2.0, "b/affine": 2.0, "c/affine": 2.0, "d/affine": 2.0}, None),
        ("Tanh", {"d/affine": 16.0}, None),
        ("no such label", {"b/affine": 4.0}, None),
    ],
)
def test_along_a_chain(label: str, scales: Dict[str, float], expected: Optional[str]) -> None:
    assert layer_to_blame(GraphPlan(chain()), label, scales) == expected


@pytest.mark.parametrize(
    ("scales", "expected"),
    [
        ({"left/affine": 2.0}, "left/affine"),
        ({"right/affine": 2.0}, "right/affine"),
        ({"head/affine": 2.0}, "head/affine"),
        # The shortcut is as near to the head as a branch is to its own layer: the head comes first.
        ({"head/affine": 8.0, "right/affine": 2.0}, "head/affine"),
        ({"head/affine": 1.0}, None),
    ],
)
def test_over_branches(scales: Dict[str, float], expected: Optional[str]) -> None:
    assert layer_to_blame(GraphPlan(branches()), "stem/affine", scales) == expected


def test_both_operands_of_a_product() -> None:
    a, b = nn.Variable((2, 3, 4), need_grad=True), nn.Variable((2, 4, 3), need_grad=True)
    loss = F.mean(F.batch_matmul(F.tanh(a), F.sigmoid(b)))
    plan = GraphPlan(loss)
    names = [s.layer for node in plan.nodes.values() for s in node.scalings]
    assert names == ["BatchMatmul", "BatchMatmul:1"]
    assert layer_to_blame(plan, "Tanh", {"BatchMatmul": 2.0, "BatchMatmul:1": 4.0}) == "BatchMatmul"
    assert layer_to_blame(plan, "Sigmoid", {"BatchMatmul": 2.0, "BatchMatmul:1": 4.0}) == "BatchMatmul:1"
    assert layer_to_blame(plan, "Sigmoid", {"BatchMatmul": 2.0}) is None
