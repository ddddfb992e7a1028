# SPDX-License-Identifier: Apache-2.0
"""What a pass has seen of components, and which of them is told to have overflowed."""

from __future__ import annotations

import math
from typing import Dict, List, Mapping, Optional, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import pytest

from nnabla_adaloss.engine.component_scales import ComponentPass
from nnabla_adaloss.engine.leaf_gradients import Written
from nnabla_adaloss.engine.measured_components import Unscaled, first_overflow, measure_components
from nnabla_adaloss.engine.statistics_source import Findings
from nnabla_adaloss.graph.plan import GraphPlan

pytestmark = pytest.mark.any_context

SCALES = [2.0, 4.0, 8.0]


class Chain:
    """A pass over two layers and a mean, each with a component of its own behind it, at its end."""

    def __init__(self) -> None:
        x = nn.Variable((2, 3))
        self.h = PF.affine(x, 3, name="first")
        self.out = PF.affine(F.tanh(self.h), 3, name="second")
        self.loss = F.mean(self.out)
        self.plan = GraphPlan(self.loss)
        self.components = ComponentPass(self.plan.components(by_layer=True), SCALES)
        self.scales: Dict[int, float] = {
            key: SCALES[component] for key, component in self.components.of.items()
        }
        self.storage: Optional[object] = None

    def of_bias(self, layer: str, largest: float, *, alone: bool = True) -> Unscaled:
        (node,) = (n for n in self.plan.nodes.values() if n.label == f"{layer}/affine")
        b = node.leaves[-1]
        own = SCALES[self.components.producers[node.function_key]]
        return Written(hash(b), node.function_key, b, b.grad, b.grad, own, alone), largest

    def measured(
        self, amax: Mapping[int, float], unscaled: List[Unscaled], nonfinite: Tuple[int, ...] = ()
    ) -> List[Optional[float]]:
        findings = Findings(set(nonfinite), dict(amax), [])
        assert measure_components(self, self.components, findings, unscaled) == set(nonfinite)  # type: ignore[arg-type]
        return self.components.magnitudes

    def overflowed(self, *bad: nn.Variable, unscaled: List[Unscaled], raised: Tuple[int, ...] = ()) -> object:
        keys = {hash(v) for v in bad}
        return first_overflow(self.plan, self.components, keys, unscaled, raised=set(raised))


def test_the_largest_gradient_of_each_component_counts() -> None:
    chain = Chain()
    amax = {hash(chain.loss): 1.0, hash(chain.out): 0.25, hash(chain.h): 3.0}
    unscaled = [chain.of_bias("second", 0.5), chain.of_bias("first", 2.0)]
    assert chain.measured(amax, unscaled) == [1.0, 0.5, 3.0]


@pytest.mark.parametrize("largest", [math.inf, 7.0])
def test_what_was_not_finite_or_is_a_sum_tells_no_magnitude(largest: float) -> None:
    chain = Chain()
    unscaled = [chain.of_bias("first", largest, alone=largest == math.inf)]
    assert chain.measured({hash(chain.h): 3.0}, unscaled, (hash(chain.out),)) == [None, None, 3.0]


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
    loss = hash(chain.loss)
    assert chain.overflowed(chain.loss, unscaled=[], raised=(loss,)) == 1
    # A layer raises nothing: what it reads belongs to its own component.
    assert chain.overflowed(chain.out, unscaled=[], raised=(hash(chain.out),)) == 1
