# SPDX-License-Identifier: Apache-2.0
"""Loss weights are read from the graph: constants, and Variables of one element as they are now."""

from __future__ import annotations

import math
from functools import reduce
from typing import Any, Callable, Dict, List, Sequence, Tuple

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

    def all(self, *, forward: bool = True, in_use: Sequence[Any] = ()) -> Dict[str, float]:
        if forward:
            self.loss.forward()
        found = self._weights.read(self.graph.variables, on_host=self._on_host, in_use=in_use)
        return dict(zip(self.components.names, found))

    def of(self, *variables: nn.Variable, **options: Any) -> List[float]:
        names, found = self.components.names, self.all(**options)
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


def test_values_that_only_waiting_could_read_count_as_one() -> None:
    for form, weight in (("computed", 1.0), ("learned", 1.0), ("Variable", 2.0**-20)):
        y = head()
        assert Read(WEIGHTED[form](y), on_host=False).of(y) == [weight]


# Of a loss that passes through a function whose derivative data decide, as nnabla computes it.
CURVED: Dict[str, Callable[[nn.Variable], nn.Variable]] = {
    "log": lambda a: F.log(a * 1e-14),
    "log of a fed weight": lambda a: F.log(a * constant(1e-12)),
    "power": lambda a: (a * 1e-5) ** 2.0,
    "root": lambda a: (a * 1e-8) ** 0.5,
    "exp": lambda a: F.exp(a * 1e-3),
    "power of a constant": lambda a: F.r_pow_scalar(a * 1e-3, 0.2),
    "reciprocal": lambda a: 1e-9 / (a * 1e-3),
    "divided by": lambda a: F.div2(constant(1e-9), a * 1e-3),
    "quotient": lambda a: (a * 1e-12) / (a * 1e-5 + 1e-3),
    "product": lambda a: (a * 1e-6) * F.tanh(a * 1e-6),
    "square": lambda a: a * a * 1e-6,
    "squared error": lambda a: F.squared_error(a, constant(1e-6)),
    "chosen": lambda a: F.where(constant(0.0), a, a * 1e-12),
    "chosen by data": lambda a: F.where(F.greater_scalar(a, 0.0).apply(need_grad=False), a * 1e-3, a * 1e-9),
    "larger": lambda a: F.maximum2(a * 1e-6, a * 1e-12),
    "not smaller": lambda a: F.maximum_scalar(a * 1e-6, -1.0),
    "reshaped": lambda a: F.sum(F.reshape(F.log(F.reshape(a * 1e-3, (1, 1))) * 1e-5, (1,))),
}


@pytest.mark.parametrize("form", CURVED)
@pytest.mark.parametrize("clear", [False, True])
def test_a_derivative_that_data_decide_is_read_after_forward(form: str, *, clear: bool) -> None:
    y = head()
    a = mean(y)
    read = Read(CURVED[form](a))
    read.loss.forward(clear_no_need_grad=clear)
    (weight,) = read.of(y, forward=False)
    a.grad.zero()
    read.loss.backward()
    assert weight == pytest.approx(abs(float(a.g)), rel=0.8)


@pytest.mark.parametrize(
    ("form", "weight"),
    [
        (lambda a: F.log(a * constant(2.0**-40)), 1.0),
        (lambda a: F.log(a * 2.0**-40) * 0.25, 0.25),
        (lambda a: F.log(a * constant(0.0) + 1.0), 0.0),
        (lambda a: (a * constant(2.0**-10)) ** 2, 2.0**-20),
        (lambda a: ((a * 2.0**-5) ** 2 * 0.5) ** 3, 2.0**-33),
        (lambda a: (a * 2.0**-10) ** 0.5 * constant(8.0), 2.0**-2),
        (lambda a: (lambda one: one * one)(a * constant(2.0**-10)), 2.0**-20),
        (lambda a: 1.0 / (a * constant(2.0**-10)), 2.0**10),
        (lambda a: F.div2(constant(1.0), a * 2.0**-10), 2.0**10),
        (lambda a: F.exp(a * constant(2.0**-10)), 2.0**-10),
        (lambda a: (lambda one: F.log(one) + one)(a * constant(2.0**10)), 2.0**10),
        (lambda a: (a * 1e-30) ** 30, 1.0),
        (lambda a: (a * 1e30) ** 30, 1.0),
        (lambda a: a * F.reshape(constant([2.0**-10]), ()), 2.0**-10),
        (lambda a: F.where(constant(0.0), a, a * 2.0**-10), 2.0**-10),
    ],
)
def test_behind_a_derivative_that_cannot_be_read_factors_count_as_its_degree_says(
    form: Any, weight: float
) -> None:
    y = head()
    assert Read(form(mean(y)), on_host=False).of(y) == [weight]
    # Backward computes again what is at the loss.
    y = head()
    with nn.recompute():
        loss = form(mean(y))
    read = Read(loss)
    read.loss.forward(clear_no_need_grad=True)
    assert read.of(y, forward=False) == [weight]


def test_weights_that_data_decide_are_those_in_use_as_long_as_they_are_near() -> None:
    a, b, fed, factor = head("a"), head("b"), constant(1.0), constant(1.0)
    read = Read(mean(a) * fed + mean(b) * (factor + 0.0))
    of, positions = read.components.of, read.graph.positions
    index = [of[positions[hash(v)]] for v in (a, b)]

    def weights(one: float, other: float) -> Tuple[float, ...]:
        fed.d, factor.d = one, other
        return tuple(read.all().values())

    in_use = [weights(1.0, 1.0), weights(1.0, 2.0**10), weights(2.0, 1.0)]

    def found(one: float, other: float) -> List[float]:
        fed.d, factor.d = one, other
        weights = [*read.all(in_use=in_use).values()]
        return [weights[i] for i in index]

    for other in (0.05, 0.5, 1.9, 2.0, 5.6):
        assert found(1.0, other) == found(1.0, 1.0) == [1.0, 1.0]
        assert found(1.0, other * 2.0**10) == [1.0, 2.0**10]
        # What constants and feeders decide counts as it is.
        assert found(2.0, other) == [2.0, 1.0]
        assert found(0.5, other)[0] == 0.5
        assert found(0.0, other)[0] == 0.0
    assert found(1.0, 0.04) == [1.0, 2.0**-5]
    assert found(1.0, 6.0) == [1.0, 8.0]
    assert found(1.0, 0.0) == [1.0, 0.0]
    # The last of those that are near.
    in_use.append(weights(1.0, 4.0))
    assert found(1.0, 1.0) == [1.0, 4.0]
    # On a GPU the sum would have to be waited for.
    assert Read(read.loss, on_host=False).all(in_use=in_use) == Read(read.loss, on_host=False).all()


def test_constants_and_fed_values_alone_make_a_component_inactive() -> None:
    def weights(form: Callable[[nn.Variable, nn.Variable], nn.Variable]) -> List[float]:
        heads = head("a"), head("b")
        return Read(form(*map(mean, heads))).of(*heads)

    assert weights(lambda a, b: a + b * 0.0) == [1.0, 0.0]
    assert weights(lambda a, b: a + b * constant(0.0)) == [1.0, 0.0]
    assert weights(lambda a, b: F.where(constant(1.0), a, b)) == [1.0, 0.0]
    assert weights(lambda a, b: a + b * (1.0 - constant(1.0))) == [1.0, 0.0]
    assert weights(lambda a, b: a + F.log(b * constant(0.0) + 1.0)) == [1.0, 0.0]
    # Another batch may choose otherwise.
    assert weights(lambda a, b: F.maximum2(a, b * 1e-3 - 1.0)) == [1.0, 2.0**-10]
    chosen = lambda a: F.greater_scalar(a, 0.0).apply(need_grad=False)  # noqa: E731
    assert weights(lambda a, b: F.where(chosen(a), a, b)) == [1.0, 1.0]
    assert weights(lambda a, b: a + b * F.relu(a * -1.0))[1] == 1.0
    learned = nn.parameter.get_parameter_or_create("s", (), np.array(0.0, np.float32))
    assert weights(lambda a, b: a + b * learned) == [1.0, 1.0]


UNKNOWN: Dict[str, Callable[[nn.Variable], nn.Variable]] = {
    "NaN": lambda y: mean(y) * constant(math.nan),
    "infinity": lambda y: mean(y) * constant(-math.inf),
    "more than float32 holds": lambda y: mean(y) * 1e39,
    "more than float64 holds": lambda y: reduce(lambda loss, _: loss * 1e38, range(9), mean(y)),
    "division by zero": lambda y: F.div2(mean(y), constant(0.0)),
    "division beyond float32": lambda y: F.div2(mean(y), constant(1e-40)),
    "array": lambda y: F.mean(y**2 * constant(np.full((8, 4), 2.0**-20))),
    "norm": lambda y: F.norm(y) + 3.0,
    "clipped": lambda y: (
        F.sum(F.clip_grad_by_value(F.reshape(mean(y), (1,)), constant([-1.0]), constant([1.0]))) * 2.0**-20
    ),
    # Only a second round over the scalar functions sees the weight 1 that clipping gives to its input.
    "clipped last": lambda y: F.clip_grad_by_value(
        F.reshape(mean(y) * 2.0**-20, (1,)), constant([-1.0]), constant([1.0])
    ),
}


@pytest.mark.parametrize("form", UNKNOWN)
def test_unknown_factors_count_as_one(form: str) -> None:
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


def test_the_largest_head_counts_where_heads_meet_also_further_on() -> None:
    """A residual stream is one component; a head that reads it early comes late in backward."""
    x = F.tanh(PF.affine(data(8, 4), 4, name="stem"))
    inner = F.tanh(PF.affine(x, 4, name="in"))
    late = x + F.tanh(PF.affine(inner, 4, name="out"))
    read = Read(mean(late) * 2.0**-30 + mean(head("early", x)) * 2.0**-10)
    # What a block leads to that came before that head is another component.
    assert read.of(x, late, inner) == [2.0**-10] * 3
    of, positions = read.components.of, read.graph.positions
    assert of[positions[hash(x)]] == of[positions[hash(late)]] != of[positions[hash(inner)]]


def test_a_leaf_reached_only_by_a_layer_has_the_weight_of_its_predecessor() -> None:
    """A leaf's gradient is kept apart, and is a component of its own where a layer scales it."""
    leaf = constant(np.ones((2, 3, 4)))
    leaf.need_grad = True
    read = Read(mean(F.batch_matmul(leaf, data(2, 4, 5))) * 2.0**-20)
    assert read.of(leaf) == [2.0**-20]


def test_descendants_of_a_clipped_gradient_have_weight_1_or_0() -> None:
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
def test_a_single_component_has_the_weight_of_its_arrays(form: str) -> None:
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
def test_references_of_a_comparison_need_no_more_memory_than_the_arrays(loop: str, *, by_layer: bool) -> None:
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
def test_graphs_of_other_shapes_share_statistics_of_weights(reduced: Any, first: float) -> None:
    def graph_of(batch: int, constant: float) -> Graph:
        h = PF.affine(F.tanh(PF.affine(data(batch, 3), 4, name="a")), 4, name="b")
        return Graph(reduced(h) * constant)

    plan = GraphPlan(graph_of(4, 1.0))
    known = plan.loss_weights(by_layer=True)
    for batch, weight in ((4, 1.0), (16, 1.0), (16, 2.0**-50), (4, 2.0**7)):
        graph = graph_of(batch, weight)
        alike = plan.of_alike(graph, GraphPlan(graph).described, plan.options)
        assert alike is not None
        weights = alike.loss_weights(by_layer=True)
        # Of a sum all elements count.
        assert (weights is known) == (weight == 1.0 and (reduced is F.mean or batch == 4))
        size = 1.0 if reduced is F.mean else batch / 4.0
        assert weights.read(graph.variables, on_host=True)[-1] == first * size * weight


def test_another_exponent_counts_at_once_though_no_derivative_can_be_read() -> None:
    def graph_of(exponent: float) -> Graph:
        return Graph((mean(head()) * 2.0**-10) ** exponent)

    plan = GraphPlan(graph_of(2.0))
    for exponent in (2.0, 3.0):
        graph = graph_of(exponent)
        plan = plan.of_alike(graph, GraphPlan(graph).described, plan.options) or plan
        found = plan.loss_weights(by_layer=True).read(graph.variables, on_host=False)
        assert found[-1] == 2.0 ** (-10.0 * exponent)


def test_values_that_forward_has_freed_count_as_one() -> None:
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
