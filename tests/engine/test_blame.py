# SPDX-License-Identifier: Apache-2.0
"""What is to blame for an overflow: a layer's own scale, the nearest towards the loss, or a component's."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Mapping, Optional, Set, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest

from nnabla_adaloss.core.statistics import ArrayStatistics, statistics_of
from nnabla_adaloss.engine.blame import first_overflow, layer_to_blame, unseen_before
from nnabla_adaloss.engine.component_pass import ComponentPass
from nnabla_adaloss.engine.leaf_gradients import Written
from nnabla_adaloss.engine.passes.hooked import measure_components
from nnabla_adaloss.engine.statistics import Findings
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


SCALES = [2.0, 4.0, 8.0]
Unscaled = Tuple[Written, float]


class Chain:
    """A pass over two layers and a mean, each with a component of its own behind it, at its end."""

    def __init__(self) -> None:
        x = nn.Variable((2, 3))
        self.h = PF.affine(x, 3, name="first")
        self.out = PF.affine(F.tanh(self.h), 3, name="second")
        self.loss = F.mean(self.out)
        self.plan = GraphPlan(self.loss)
        self.components = ComponentPass(self.plan.structure.components(by_layer=True), SCALES)
        self.scales: Dict[int, float] = {
            position: SCALES[component] for position, component in self.components.of.items()
        }

    def position(self, variable: nn.Variable) -> int:
        return self.plan.positions[hash(variable)]

    def of_bias(self, layer: str, largest: float, *, alone: bool = True) -> Unscaled:
        (node,) = (n for n in self.plan.nodes.values() if n.label == f"{layer}/affine")
        b = node.leaves[-1]
        own = SCALES[self.components.producers[node.number]]
        return Written(self.position(b), node.number, b, b.grad, b.grad, own, alone), largest

    def measured(
        self,
        amax: Mapping[nn.Variable, float],
        unscaled: List[Unscaled],
        *nonfinite: nn.Variable,
        storage: Any = None,
    ) -> Tuple[Set[int], List[Optional[float]]]:
        found = {self.position(v): largest for v, largest in amax.items()}
        findings = Findings({self.position(v) for v in nonfinite}, found, [])
        bad = measure_components(self.plan, self.components, self.scales, findings, unscaled, storage)
        return bad, self.components.magnitudes

    def overflowed(
        self, *bad: nn.Variable, unscaled: List[Unscaled], raised: Tuple[nn.Variable, ...] = ()
    ) -> object:
        positions, lifted = {self.position(v) for v in bad}, {self.position(v) for v in raised}
        leaves = [(entry.leaf, entry.function) for entry, largest in unscaled if largest == math.inf]
        return first_overflow(self.plan, self.components, positions, leaves, raised=lifted)


class Seen:
    """A storage that has seen some gradients."""

    def __init__(self, found: Dict[int, ArrayStatistics]) -> None:
        self._found = found

    def gradient_statistics(self, key: int) -> Optional[ArrayStatistics]:
        return self._found.get(key)


def test_the_largest_gradient_of_each_component_counts() -> None:
    chain = Chain()
    amax = {chain.loss: 1.0, chain.out: 0.25, chain.h: 3.0}
    unscaled = [chain.of_bias("second", 0.5), chain.of_bias("first", 2.0)]
    assert chain.measured(amax, unscaled) == (set(), [1.0, 0.5, 3.0])


def test_what_a_storage_has_seen_counts_beside_what_was_measured() -> None:
    chain = Chain()
    # Both carry the scale of their component: 4 and 8.
    stored = {
        hash(chain.out): statistics_of(np.array([1.0, 6.0])),
        hash(chain.h): statistics_of(np.array([np.inf, 2.0])),
    }
    bad, magnitudes = chain.measured({chain.loss: 1.0, chain.out: 0.5}, [], storage=Seen(stored))
    assert bad == {chain.position(chain.h)}
    assert magnitudes == [1.0, 1.5, 0.25]


@pytest.mark.parametrize("largest", [math.inf, 7.0])
def test_what_was_not_finite_or_is_a_sum_tells_no_magnitude(largest: float) -> None:
    chain = Chain()
    unscaled = [chain.of_bias("first", largest, alone=largest == math.inf)]
    bad = {chain.position(chain.out)}
    assert chain.measured({chain.h: 3.0}, unscaled, chain.out) == (bad, [None, None, 3.0])


def test_the_first_overflow_in_backward_order_is_told() -> None:
    chain = Chain()
    bad = [chain.of_bias("first", math.inf), chain.of_bias("second", math.inf)]
    assert chain.overflowed(unscaled=[]) is None
    assert chain.overflowed(unscaled=[chain.of_bias("first", 1.0)]) is None
    assert chain.overflowed(unscaled=bad[:1]) == 2
    assert chain.overflowed(unscaled=bad) == 1
    assert chain.overflowed(chain.h, unscaled=[]) == 2
    assert chain.overflowed(chain.h, chain.out, unscaled=bad) == 1
    assert chain.overflowed(chain.loss, chain.out, unscaled=bad) == 0


def test_what_was_raised_too_far_is_laid_to_the_component_behind() -> None:
    chain = Chain()
    assert chain.overflowed(chain.loss, unscaled=[], raised=(chain.loss,)) == 1
    # A layer raises nothing: what it reads belongs to its own component.
    assert chain.overflowed(chain.out, unscaled=[], raised=(chain.out,)) == 1


def test_what_may_have_handed_an_overflow_on_is_what_is_before_it_and_was_not_seen() -> None:
    """Attention has no weights of its own: an overflow of its scores shows in the layers that make them."""
    x = nn.Variable((2, 3, 4))
    q, k, v = (PF.affine(x, 4, base_axis=2, name=name) for name in "qkv")
    scores = F.softmax(F.batch_matmul(q, k, transpose_b=True))
    mixed = F.batch_matmul(scores, v)
    out = PF.affine(mixed, 4, base_axis=2, name="out")
    plan = GraphPlan(F.mean(out))
    components = plan.structure.components(by_layer=True)

    def of(variable: nn.Variable) -> int:
        return components.of[plan.positions[hash(variable)]]

    assert unseen_before(components, of(q), {of(out)}) == {of(scores), of(mixed)}
    assert unseen_before(components, of(q), {of(out), of(mixed)}) == {of(scores)}
    # The scalar before the top layer is no suspect.
    assert unseen_before(components, of(out), set()) == set()
