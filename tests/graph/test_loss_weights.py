# SPDX-License-Identifier: Apache-2.0
"""Loss weights are read from the graph: constants, and Variables of one element as they are now."""

from __future__ import annotations

import math
from functools import reduce
from typing import Any, Callable, Dict, List

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest

from nnabla_adaloss.graph.graph import Graph
from nnabla_adaloss.graph.loss_weights import seed_weight
from nnabla_adaloss.graph.plan import GraphPlan
from tests.worlds.values import constant, data


class Read:
    """What is read of a graph, by variable."""

    def __init__(
        self, loss: nn.Variable, *, on_host: bool = True, by_layer: bool = True, **options: Any
    ) -> None:
        self.loss, self.graph = loss, Graph(loss)
        structure = GraphPlan(self.graph, **options)
        self.components = structure.components(by_layer=by_layer)
        self._weights, self._on_host = structure.loss_weights(by_layer=by_layer), on_host

    def all(self) -> Dict[str, float]:
        self.loss.forward()
        found = self._weights.read(self.graph.variables, on_host=self._on_host)
        return dict(zip(self.components.names, found))

    def of(self, *variables: nn.Variable) -> List[float]:
        names, found = self.components.names, self.all()
        return [found[names[self.components.of[self.graph.positions[hash(v)]]]] for v in variables]


def head(name: str = "head", h: Any = None) -> nn.Variable:
    """What a head computes from data, or from a trunk."""
    return PF.affine(data(8, 3) if h is None else h, 4, name=name)


def mean(y: nn.Variable) -> nn.Variable:
    return F.mean(y**2)


WEIGHTED: Dict[str, Callable[[nn.Variable], nn.Variable]] = {
    "constant": lambda y: mean(y) * 2.0**-20,
    "quotient of a constant": lambda y: mean(y) / 2.0**20,
    "Variable": lambda y: mean(y) * constant(2.0**-20),
    "Variable that comes first": lambda y: F.mul2(constant(2.0**-20), mean(y)),
    "Variable that divides": lambda y: F.div2(mean(y), constant(2.0**20)),
    "array of one element": lambda y: F.sum(F.reshape(mean(y), (1,)) * constant([2.0**-20])),
    "nested": lambda y: ((mean(y) * 2.0**-10 + 1.0) * constant(2.0**-12) - 3.0) * 4.0,
    "twice": lambda y: (lambda one: one * 2.0**-21 + one * constant(2.0**-21))(mean(y)),
    "computed": lambda y: mean(y) * (1.0 - constant(1.0 - 2.0**-20)),
    "learned": lambda y: (
        mean(y) * nn.parameter.get_parameter_or_create("w", (), np.array(2.0**-20, np.float32))
    ),
}


@pytest.mark.parametrize("form", WEIGHTED)
def test_every_form_of_a_weight_is_read(form: str) -> None:
    y = head()
    read = Read(WEIGHTED[form](y))
    assert read.of(y) == [2.0**-20]
    assert next(iter(read.all().values())) == 1.0


def test_what_only_waiting_could_read_counts_as_one() -> None:
    for form, weight in (("computed", 1.0), ("learned", 1.0), ("Variable", 2.0**-20)):
        y = head()
        assert Read(WEIGHTED[form](y), on_host=False).of(y) == [weight]


UNKNOWN: Dict[str, Callable[[nn.Variable], nn.Variable]] = {
    "NaN": lambda y: mean(y) * constant(math.nan),
    "infinity": lambda y: mean(y) * constant(-math.inf),
    "more than float32 holds": lambda y: mean(y) * 1e39,
    "more than float64 holds": lambda y: reduce(lambda loss, _: loss * 1e38, range(9), mean(y)),
    "division by zero": lambda y: F.div2(mean(y), constant(0.0)),
    "division beyond float32": lambda y: F.div2(mean(y), constant(1e-40)),
    "the other way round": lambda y: F.div2(constant(8.0), mean(y)),
    "square": lambda y: (lambda one: one * one)(mean(y)),
    "array": lambda y: F.mean(y**2 * constant(np.full((8, 4), 2.0**-20))),
    "norm": lambda y: F.norm(y) + 3.0,
    "clipped": lambda y: (
        F.sum(F.clip_grad_by_value(F.reshape(mean(y), (1,)), constant([-1.0]), constant([1.0]))) * 2.0**-20
    ),
}


@pytest.mark.parametrize("form", UNKNOWN)
def test_what_is_not_known_counts_as_one(form: str) -> None:
    y = head()
    assert Read(UNKNOWN[form](y)).of(y) == [1.0]


@pytest.mark.parametrize(
    ("value", "weight"),
    [(3.0, 2.0), (-0.75, 0.5), (1e-40, 2.0**-133), (1e-50, 0.0), (0.0, 0.0), (-0.0, 0.0)],
)
def test_a_weight_is_rounded_down_to_a_power_of_two_as_float32_holds_it(value: float, weight: float) -> None:
    for scaled in (lambda y: mean(y) * value, lambda y: mean(y) * constant(value)):
        y = head()
        assert Read(scaled(y)).of(y) == [weight]


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32])
def test_feeders_write_numbers_of_any_type(dtype: Any) -> None:
    y, weight = head(), nn.Variable((1, 1))
    read = Read(F.sum(F.reshape(mean(y), (1, 1)) * weight))
    for value in (4, 0, 2):
        weight.d = np.full((1, 1), value, dtype)
        assert read.of(y) == [float(value)]
    weight.data.zero()
    assert read.of(y) == [0.0]
    weight.data.fill(4)
    assert read.of(y) == [4.0]


def test_each_head_has_its_own_and_a_trunk_the_largest() -> None:
    weights = [constant(0.0) for _ in range(2)]
    trunk = F.tanh(PF.affine(data(8, 3), 5, name="trunk"))
    below = F.tanh(PF.affine(trunk, 5, name="below"))
    first, second = head("first", below), head("second", below)
    read = Read(mean(first) * weights[0] + mean(second) * weights[1])
    for a, b in ((1.0, 2.0**-30), (0.0, 2.0**-30), (4.0, 0.0), (0.0, 0.0)):
        weights[0].d, weights[1].d = a, b
        assert read.of(first, second, below, trunk) == [a, b, max(a, b), max(a, b)]


def test_where_heads_meet_the_largest_counts_also_where_it_joins_further_on() -> None:
    """A residual stream is one component; a head that reads it early comes late in backward."""
    x = F.tanh(PF.affine(data(8, 4), 4, name="stem"))
    inner = F.tanh(PF.affine(x, 4, name="in"))
    late = x + F.tanh(PF.affine(inner, 4, name="out"))
    read = Read(mean(late) * 2.0**-30 + mean(head("early", x)) * 2.0**-10)
    # What a block leads to that came before that head is another component.
    assert read.of(x, late, inner) == [2.0**-10] * 3
    of, positions = read.components.of, read.graph.positions
    assert of[positions[hash(x)]] == of[positions[hash(late)]] != of[positions[hash(inner)]]


def test_what_only_a_layer_brings_to_a_leaf_is_weighed_as_what_comes_before_it() -> None:
    """A leaf's gradient is kept apart, and is a component of its own where a layer scales it."""
    leaf = constant(np.ones((2, 3, 4)))
    leaf.need_grad = True
    read = Read(mean(F.batch_matmul(leaf, data(2, 4, 5))) * 2.0**-20)
    assert read.of(leaf) == [2.0**-20]


def test_what_a_clipped_gradient_leads_to_is_weighed_by_nothing_but_whether_it_is_there() -> None:
    weight, y = constant(1.0), head()
    inner = F.tanh(y)
    read = Read(mean(F.clip_grad_by_norm(PF.affine(inner, 4, name="out"), 1.0)) * weight)
    for value, behind in ((2.0**-30, 1.0), (1e20, 1.0), (0.0, 0.0)):
        weight.d = value
        assert read.of(y) == [behind]


def test_a_loss_of_several_elements_and_one_that_a_layer_computes_weigh_one() -> None:
    y = head()
    assert Read(y).of(y) == [1.0]
    y = head()
    for by_layer in (True, False):
        loss = PF.affine(F.reshape(y, (1, -1)), 1, name="single")
        assert set(Read(loss, by_layer=by_layer).all().values()) == {1.0}


@pytest.mark.parametrize("form", WEIGHTED)
def test_where_all_is_one_component_it_has_the_weight_of_its_arrays(form: str) -> None:
    """With one scale for all layers; its single elements weigh as much as the loss itself."""
    y = head()
    read = Read(WEIGHTED[form](F.tanh(y)), by_layer=False, adaptive=False)
    assert list(read.all().values()) == [2.0**-20]


LOOPS: Dict[str, Callable[[nn.Variable], nn.Variable]] = {
    "variance": lambda v: F.mean((v - F.mean(v, keepdims=True)) ** 2) + F.mean(v),
    "times its sum": lambda v: F.mean(v * F.sum(v, keepdims=True)) * 0.25,
    "beside its sum": lambda v: F.sum(F.concatenate(F.reshape(v, (1, -1)), F.sum(v, keepdims=True), axis=1)),
}


@pytest.mark.parametrize("by_layer", [True, False])
@pytest.mark.parametrize("loop", LOOPS)
def test_what_arrays_are_compared_with_weighs_no_more_than_these(loop: str, *, by_layer: bool) -> None:
    """A single element further on is computed from an array, and computes one: no factor counts twice."""
    y = head()
    read = Read(LOOPS[loop](F.reshape(F.sigmoid(y), (8, 4))), by_layer=by_layer, adaptive=by_layer)
    assert max(read.all().values()) <= 64.0
    assert min(read.all().values()) >= 0.25


def test_a_gradient_that_comes_from_an_array_too_is_there_without_a_loss_weight() -> None:
    h = F.sigmoid(head())
    centre, weight = F.mean(h, keepdims=True), constant([[0.0]])
    read = Read(F.mean((h - centre) ** 2) * 0.5 + F.sum(centre * weight))
    assert read.of(h) == [0.5]
    # So is what lies behind that alone.
    y, centre = F.sigmoid(head("first")), F.mean(head("second"), keepdims=True)
    read = Read(F.mean((y - centre) ** 2) * 0.5 + F.sum(centre * weight))
    assert read.of(centre.parent.inputs[0]) == [0.5]
    # Where that is all there is, nothing is.
    h = F.sigmoid(head())
    read = Read(F.sum(F.mean(h, keepdims=True) * weight))
    assert read.of(h) == [0.0]


@pytest.mark.parametrize("stacked", [F.stack, lambda *losses: F.concatenate(*losses, axis=0)])
def test_losses_that_are_put_together_in_an_array_keep_their_own(stacked: Any) -> None:
    first, second = head("first"), head("second")
    losses = [F.reshape(mean(first) * 0.25, (1,)), F.reshape(mean(second) * constant(2.0**-30), (1,))]
    read = Read(F.mean(stacked(*losses)))
    assert read.of(first, second) == [0.25, 2.0**-30]


@pytest.mark.parametrize(("reduced", "first"), [(F.mean, 1.0), (F.sum, 16.0)])
def test_graphs_of_other_shapes_share_what_is_known_of_their_weights(reduced: Any, first: float) -> None:
    def graph_of(batch: int, constant: float) -> Graph:
        h = PF.affine(F.tanh(PF.affine(data(batch, 3), 4, name="a")), 4, name="b")
        return Graph(reduced(h) * constant)

    plan = GraphPlan(graph_of(4, 1.0))
    known = plan.loss_weights(by_layer=True)
    for batch, weight in ((4, 1.0), (16, 1.0), (16, 2.0**-50), (4, 2.0**7)):
        graph = graph_of(batch, weight)
        alike = plan.of_alike(GraphPlan(graph).described, plan.options)
        assert alike is not None
        weights = alike.loss_weights(by_layer=True)
        # Of a sum all elements count.
        assert (weights is known) == (weight == 1.0 and (reduced is F.mean or batch == 4))
        size = 1.0 if reduced is F.mean else batch / 4.0
        assert weights.read(graph.variables, on_host=True)[-1] == first * size * weight


def test_what_forward_has_freed_counts_as_one() -> None:
    y, weight = head(), 1.0 - constant(0.75)
    loss = mean(y) * weight
    variables = Graph(loss).variables
    weights = GraphPlan(loss).loss_weights(by_layer=True)
    loss.forward(clear_no_need_grad=True)
    assert weights.read(variables, on_host=True)[-1] == 0.25
    weight.data.clear()
    assert weights.read(variables, on_host=True)[-1] == 1.0


@pytest.mark.parametrize(
    ("seed", "weight"),
    [(np.array([0.5, -3.0]), 2.0), ([1e-9], 2.0**-30), (0.75, 0.5)]
    + [(np.array(values), 1.0) for values in ([0.0, -0.0], [np.inf, 1.0], [np.nan, 1.0], [])],
)
def test_the_weight_of_a_seed_gradient(seed: Any, weight: float) -> None:
    assert seed_weight(seed, on_host=True) == weight
    array = nn.NdArray.from_numpy_array(np.atleast_1d(seed))
    assert seed_weight(array, on_host=True) == weight
    # It would have to be fetched.
    assert seed_weight(array, on_host=False) == 1.0
