# SPDX-License-Identifier: Apache-2.0
"""What a pass has found: how large gradients are, and where an overflow began."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence, Set, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest

from nnabla_adaloss import AdaptiveLossScaling, FormatEmulation
from nnabla_adaloss.core.schedule import ScaleSchedule
from nnabla_adaloss.engine.leaf_gradients import TakenLeaf
from nnabla_adaloss.engine.report import (
    PassReport,
    amax_of_components,
    first_overflow,
    unseen_before,
)
from tests.worlds import random_structures as graphs

pytestmark = pytest.mark.any_context


class Graph(graphs.Graph):
    """A graph that never runs; what was found goes by variable, and by layer for gradients of parameters."""

    def of(self, *variables: nn.Variable) -> List[int]:
        return list(map(self.index, variables))

    def function(self, layer: str) -> Any:
        (found,) = (n for n in self.structure.nodes if n.label == f"{layer}/affine")
        return found

    def taken(self, layer: str) -> TakenLeaf:
        function = self.function(layer)
        at = function.leaves[-1]
        return TakenLeaf(at, function.number, self.plan.all_variables[at], 1.0, half=False, in_place=False)

    def amax(
        self, gradients: Mapping[nn.Variable, float], biases: Sequence[Tuple[str, float]]
    ) -> Dict[int, float]:
        seen = [(self.taken(one), largest) for one, largest in biases]
        found = {self.position(v): largest for v, largest in gradients.items()}
        return amax_of_components(self.structure, self.components, found.items(), seen)

    def overflowed(
        self, *bad: nn.Variable, biases: Sequence[str] = (), raised: Sequence[nn.Variable] = ()
    ) -> Optional[int]:
        return first_overflow(
            self.structure,
            self.components,
            {self.position(v) for v in bad},
            {
                self.function(layer).number: self.components.producers[self.function(layer).number]
                for layer in biases
            },
            raised={self.position(v) for v in raised},
        )

    def unseen(self, overflowed: nn.Variable, *seen: nn.Variable) -> Set[int]:
        return unseen_before(self.components, self.of(overflowed)[0], {*self.of(*seen)})

    def report(self, fixed_scale: Optional[float] = None, **found: Any) -> PassReport:
        count = len(self.components.names)
        schedule = ScaleSchedule(
            self.structure.nodes, self.components, [8.0] * count, fixed_scale, (1.0,) * count
        )
        return PassReport(self.plan, schedule, schedule.scales, (), (), **found)


class Chain(Graph):
    """A mean and two layers: three components, and that of data nobody wants a gradient of."""

    def __init__(self) -> None:
        self.h = PF.affine(nn.Variable((2, 3)), 3, name="first")
        self.out = PF.affine(F.tanh(self.h), 3, name="second")
        self.loss = F.mean(self.out)
        super().__init__(self.loss)


def test_the_largest_gradient_of_each_component_counts() -> None:
    n = Chain()
    found = n.amax({n.loss: 1.0, n.out: 0.25, n.h: 3.0}, [("second", 0.5), ("first", 2.0)])
    assert [found[index] for index in n.of(n.loss, n.out, n.h)] == [1.0, 0.5, 3.0]


def test_a_leaf_that_a_layer_scales_counts_for_what_is_behind_the_layer() -> None:
    x = nn.Variable((2, 3), need_grad=True)
    n = Graph(F.mean(PF.affine(x, 3, name="first") + F.tanh(x)))
    at_x, layer = n.position(x), n.function("first")
    (tanh,) = (node for node in n.structure.nodes if node.type_name == "Tanh")
    before, behind = n.components.producers[layer.number], n.components.of[at_x]
    assert before != behind
    for function, index in ((layer, behind), (tanh, before)):
        seen = TakenLeaf(at_x, function.number, x, 1.0, half=False, in_place=False), 3.0
        assert amax_of_components(n.structure, n.components, [], [seen]) == {index: 3.0}


def test_the_first_overflow_in_backward_order_is_told() -> None:
    n = Chain()
    of_loss, of_out, of_h = n.of(n.loss, n.out, n.h)
    assert n.overflowed() is None
    assert n.overflowed(biases=["first"]) == of_h
    assert n.overflowed(biases=["first", "second"]) == of_out
    assert n.overflowed(n.h) == of_h
    assert n.overflowed(n.h, n.out, biases=["first"]) == of_out
    assert n.overflowed(n.loss, n.out, biases=["second"]) == of_loss


def test_what_was_raised_too_far_is_laid_to_the_component_behind() -> None:
    n = Chain()
    of_out = n.of(n.out)[0]
    assert n.overflowed(n.loss, raised=[n.loss]) == of_out
    # A layer raises nothing: what it reads belongs to its own component.
    assert n.overflowed(n.out, raised=[n.out]) == of_out


def test_what_may_have_handed_an_overflow_on_is_what_is_before_it_and_was_not_seen() -> None:
    """Attention has no weights of its own: an overflow of its scores shows in the layers that make them."""
    x = nn.Variable((2, 3, 4))
    q, k, v = (PF.affine(x, 4, base_axis=2, name=name) for name in "qkv")
    scores = F.softmax(F.batch_matmul(q, k, transpose_b=True))
    mixed = F.batch_matmul(scores, v)
    out = PF.affine(mixed, 4, base_axis=2, name="out")
    n = Graph(F.mean(out))
    assert n.unseen(q, out) == {*n.of(scores, mixed)}
    assert n.unseen(q, out, mixed) == {*n.of(scores)}
    # The scalar before the top layer is no suspect.
    assert n.unseen(out) == set()
    # Two layers beside a shortcut: what is between them comes before what is around them, and behind it.
    inner = F.tanh(PF.affine(x, 4, base_axis=2, name="inner"))
    joined = Graph(
        F.mean(F.tanh(inner) + PF.affine(F.tanh(PF.affine(inner, 4, base_axis=2)), 4, base_axis=2))
    )
    between = next(edge.after for edge in joined.components.edges if edge.layer is not None)
    assert unseen_before(joined.components, between, set()) == {*joined.of(inner)}


@pytest.mark.parametrize(("fixed", "helps"), [(None, False), (8.0, True)])
def test_a_given_s0_decides_about_what_is_before_any_layer_and_what_is_joined_with_the_loss(
    fixed: Optional[float], helps: bool
) -> None:
    n = Chain()
    of_loss, of_out, of_h = n.of(n.loss, n.out, n.h)
    for overflowed, own in ((of_loss, helps), (of_out, helps), (of_h, False), (None, False)):
        assert n.report(fixed, overflowed=overflowed).only_s0_helps == own
    # Of a loss of several elements a layer may lead back to the component.
    joined = Graph(n.h + PF.affine(F.tanh(PF.affine(n.h, 3, name="inner")), 3, name="outer"))
    assert joined.components.before_layers == frozenset()
    assert joined.report(fixed, overflowed=joined.components.root).only_s0_helps == helps
    assert not joined.report(fixed, overflowed=1).only_s0_helps


def test_the_batch_once_more_may_tell_more_unless_all_was_measured_or_s0_decides_about_everything() -> None:
    for fixed in (None, 8.0):
        assert Chain().report(fixed).can_measure_more
        assert not Chain().report(fixed, measured_all=True).can_measure_more
    # A single layer, whose input needs no gradient.
    n = Graph(F.mean(PF.affine(nn.Variable((2, 3)), 3, name="only")))
    assert not n.report(8.0).can_measure_more
    assert n.report(None).can_measure_more


# What the engine reports.


def test_an_overflow_is_told_by_the_function_where_it_began() -> None:
    x = nn.Variable.from_numpy_array(np.ones((2, 3), np.float32))
    h = F.tanh(PF.affine(x, 3, name="first"))
    loss = F.sum(PF.affine(h, 3, name="second"))
    weight = nn.get_parameters()["second/affine/W"]
    weight.d = 60000.0
    scaling = AdaptiveLossScaling(FormatEmulation(loss, "float16"))
    scaling.forward()
    scaling.backward(8.0)
    result = scaling.result
    assert result.component == "first/affine/Tanh"
    assert list(result.found_inf) == ["first/affine/Tanh", "first/affine"]
    assert repr(result).startswith(
        "PassReport(kind='measuring', found_inf=['first/affine/Tanh', 'first/affine'],"
    )


def test_with_a_given_s0_an_overflow_joined_with_the_loss_is_no_matter_of_other_scales() -> None:
    x = nn.Variable.from_numpy_array(np.ones((2, 3), np.float32))
    h = PF.affine(x, 3, name="first")
    joined = h + PF.affine(F.tanh(PF.affine(h, 3, name="inner")), 3, name="outer")
    scaling = AdaptiveLossScaling(FormatEmulation(joined, "float16"))
    seed = np.full(joined.shape, 100.0, np.float32)

    def backward(scale: float, *, again: bool) -> None:
        for v in nn.get_parameters().values():
            v.grad.zero()
        scaling.forward()
        scaling.backward(scale, grad=seed, iteration=0, again=again)

    for again in (False, True):
        backward(8.0, again=again)
    assert scaling.result.component is None
    backward(1024.0, again=True)
    before = scaling.result.schedule.component_scales
    assert scaling.result.overflowed == scaling.result.schedule.components.root
    assert not scaling.after_overflow()
    backward(1024.0, again=True)
    assert scaling.result.schedule.component_scales == before
