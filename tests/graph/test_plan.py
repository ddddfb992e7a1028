# SPDX-License-Identifier: Apache-2.0
"""The plan: order, roles and fan-ins, the same for graphs wired alike; weights that can be swapped."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple, Union

import hypothesis.strategies as st
import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from nnabla_adaloss import AdaptiveLossScaling
from nnabla_adaloss.core.layer_selection import LayerSelection
from nnabla_adaloss.graph.graph import Graph
from nnabla_adaloss.graph.plan import GraphPlan
from tests.worlds.random_graphs import WIDTH, Network, build, chosen_steps, networks, seeds
from tests.worlds.tampering import Gate
from tests.worlds.values import FLOAT, HALF, data


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(networks)
def test_the_order_is_nnablas(network: Network) -> None:
    seen: List[int] = []
    network.loss.forward()
    network.loss.backward(function_pre_hook=lambda f: seen.append(hash(f)))
    graph = Graph(network.loss)
    assert [hash(graph.functions[node.number]) for node in GraphPlan(graph).nodes] == seen


def residual() -> nn.Variable:
    x = nn.Variable((2, 3, 8, 8))
    h = F.relu(PF.convolution(x, 4, (3, 3), pad=(1, 1), stride=(2, 2), name="stem"))
    h = h + PF.convolution(h, 4, (3, 3), pad=(1, 1), group=2, name="block")
    with nn.parameter_scope("head"):
        y = PF.affine(h, 5, name="fc")
    labels = F.constant(0, (2, 1))
    return F.mean(F.softmax_cross_entropy(y, labels)) * 0.5


def test_the_table_tells_roles_layers_and_fan_ins() -> None:
    table = str(AdaptiveLossScaling(residual()).plan).splitlines()[2:]
    assert [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in table] == [
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


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(seeds, chosen_steps, st.booleans())
def test_a_graph_that_is_built_again_has_the_plan_that_it_would_get(
    seed: int, steps: List[str], input_gradient: bool
) -> None:
    first = build(seed, steps, input_gradient=input_gradient)
    again = build(seed, steps, input_gradient=input_gradient, known=first.leaves)
    names = {hash(leaf): f"scope/{name}" for name, leaf in first.leaves.items()}
    known, made = (GraphPlan(network.loss, names=names) for network in (first, again))
    assert known.of_alike(Graph(again.loss), made.described, made.options) is known
    assert str(made) == str(known)
    for name in ("nodes", "roots", "gradients", "leaves", "state_leaves", "labels", "names", "readers"):
        assert getattr(known, name) == getattr(made, name)


# Those that take batches of any size.
ANY_BATCH = ["affine", "shared", "tied", "tanh", "relu", "add", "multiply", "prelu", "batch_normalization"]


def of_alike(plan: GraphPlan, loss: nn.Variable) -> Optional[GraphPlan]:
    return plan.of_alike(Graph(loss), GraphPlan(loss).described, plan.options)


def facts(plan: GraphPlan) -> Dict[str, Any]:
    # Leaves are held by the one that was made first, and what is asked for is kept when it was.
    asked = {name for name, value in vars(GraphPlan).items() if isinstance(value, cached_property)}
    return {k: v for k, v in vars(plan).items() if k not in asked | {"_held", "_components"}}


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(seeds, st.lists(st.sampled_from(ANY_BATCH), max_size=6), st.integers(2, 6), st.integers(2, 6))
def test_a_reshaped_plan_equals_a_new_one(seed: int, steps: Any, first: int, second: int) -> None:
    one = build(seed, steps, input_gradient=False, batch=(first, WIDTH))
    other = build(seed, steps, input_gradient=False, batch=(second, WIDTH), known=one.leaves)
    plan = GraphPlan(one.loss)
    found = of_alike(plan, other.loss)
    assert found is not None
    assert facts(found) == facts(GraphPlan(other.loss))
    assert (found is plan) == (first == second)


def kept(blocks: Sequence[int], width: int = 4) -> nn.Variable:
    """A residual network of these blocks."""
    h = PF.affine(nn.Variable((2, 3)), width, name="first")
    for block in blocks:
        with nn.parameter_scope(f"block{block}"):
            h = h + PF.affine(F.tanh(PF.affine(h, width, name="a")), width, name="b") * 0.5
    return F.mean(PF.affine(h, 2, name="out") ** 2)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=2, max_size=2), st.booleans())
def test_a_plan_of_other_parameters_equals_a_new_one(blocks: Any, asked: bool) -> None:
    first, second = map(kept, blocks)
    plan, graph, made = GraphPlan(first), Graph(second), GraphPlan(second)
    every = [name for name, value in vars(GraphPlan).items() if isinstance(value, cached_property)]
    assert not asked or all(getattr(plan, name) is not None for name in every)
    found = plan.with_other_parameters(graph, made.described, made.options)
    # A block that is run twice is wired otherwise.
    alike = len({*blocks[0]}) == len(blocks[0]) == len(blocks[1]) == len({*blocks[1]})
    assert found is not None or not alike
    if found is not None:
        assert facts(found) == facts(made)
        assert [getattr(found, name) for name in every] == [getattr(made, name) for name in every]
        assert found.components(by_layer=True) == made.components(by_layer=True)
        assert str(found) == str(made)


def test_a_plan_with_selected_layers_is_not_shared_with_others() -> None:
    selection = LayerSelection(exclude=("out*",))
    plan, made = (GraphPlan(kept(blocks), selection) for blocks in ([0], [1]))
    assert plan.with_other_parameters(Graph(kept([1])), made.described, made.options) is None


def attention(length: int) -> nn.Variable:
    x = nn.Variable((2, length, 4))
    rows = PF.affine(x, 4, base_axis=2, name="a")
    scores = F.softmax(F.batch_matmul(rows, rows * 2.0, transpose_b=True))
    return F.mean(F.reshape(F.batch_matmul(scores, rows), (2 * length, 4)) ** 2)


def test_properties_that_follow_from_shapes_are_computed_again() -> None:
    longer = attention(5)
    plan = GraphPlan(attention(3))
    asked = [name for name, value in vars(GraphPlan).items() if isinstance(value, cached_property)]
    assert all(getattr(plan, name) is not None for name in asked)
    found, made = of_alike(plan, longer), GraphPlan(longer)
    assert found is not None
    assert facts(found) == facts(made)
    assert [getattr(found, name) for name in asked] == [getattr(made, name) for name in asked]
    before, now = (
        [
            slot.scaled.fan_in
            for node in one.nodes
            for slot in node.layer_inputs
            if node.type_name == "BatchMatmul"
        ]
        for one in (plan, found)
    )
    assert before == [4.0, 3.0, 3.0, 3.0]
    assert now == [4.0, 5.0, 5.0, 5.0]


def normalized(batch: int, *, batch_stat: bool) -> nn.Variable:
    """With a bias that is as large as a batch of one."""
    h = F.tanh(PF.affine(nn.Variable((batch, 3)), 5, name="a"))
    h = h + F.tanh(nn.parameter.get_parameter_or_create("b", (1, 5), need_grad=True))
    return F.mean(F.sigmoid(PF.batch_normalization(h, batch_stat=batch_stat, name="bn")))


def test_inputs_of_float_functions_in_a_half_network_limit_no_scale() -> None:
    for last, limits in ((HALF, True), (FLOAT, False)):
        nn.clear_parameters()
        with nn.context_scope(HALF):
            h = PF.affine(F.tanh(PF.affine(data(4, 5), 6, name="a")), 3, name="b")
        with nn.context_scope(last):
            y = F.softplus(h)
            loss = F.mean(y**2)
        graph = Graph(loss)
        found = GraphPlan(graph).limiting_gradients
        assert graph.positions[hash(h)] in found
        assert (graph.positions[hash(y)] in found) == limits


@pytest.mark.parametrize("name", ["largest_gradients", "state_leaves"])
def test_properties_that_follow_from_batch_and_arguments_are_computed_again(name: str) -> None:
    one, other = GraphPlan(normalized(1, batch_stat=True)), normalized(4, batch_stat=False)
    before, found = getattr(one, name), of_alike(one, other)
    assert getattr(found, name) == getattr(GraphPlan(other), name) != before


@pytest.mark.parametrize("written_first", [False, True])
def test_a_leaf_that_one_of_its_readers_writes_is_written(written_first: bool) -> None:
    state = nn.Variable((2, 3))
    terms = [F.mean(F.assign(state, nn.Variable((2, 3), need_grad=True) * 2.0)), F.mean(F.tanh(state))]
    graph = Graph(F.add2(*(terms if written_first else terms[::-1])))
    assert GraphPlan(graph).state_leaves[graph.positions[hash(state)]] is not None


def network(*, depth: int = 2, batch: int = 4, activation: Any = F.tanh, frozen: bool = False) -> nn.Variable:
    h = nn.Variable((batch, 3))
    for index in range(depth):
        h = activation(PF.affine(h, 3, name=f"layer{index}"))
    if frozen:
        h.need_grad = False
    return F.mean(PF.affine(h, 1, name="last") ** 2)


def taps(*last: int) -> nn.Variable:
    return F.mean(F.sum(PF.affine(nn.Variable((2, 3)), 4, name="layer0"), axis=last) ** 2)


def on(x: nn.Variable) -> nn.Variable:
    return F.mean(PF.affine(x, 3, name="layer0") ** 2)


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (network, lambda: network(batch=7), True),
        (network, lambda: network(depth=3), False),
        (network, lambda: network(activation=F.relu), False),
        (network, lambda: network(frozen=True), False),
        (network, lambda: attention(3), False),
        # Functions of one element at the loss can take any scale.
        (lambda: taps(1), lambda: taps(0), True),
        (lambda: taps(1), lambda: taps(0, 1), False),
    ],
)
def test_graphs_that_are_wired_otherwise(
    one: Callable[[], nn.Variable], other: Callable[[], nn.Variable], alike: bool
) -> None:
    plan = GraphPlan(one())
    assert of_alike(plan, one()) is plan
    assert (of_alike(plan, other()) is not None) == alike


def test_data_whose_gradient_is_wanted_are_other_leaves_in_each_graph() -> None:
    def graph(read: Callable[[nn.Variable], nn.Variable], shape: Tuple[int, ...] = (2, 3)) -> nn.Variable:
        return read(nn.Variable(shape, need_grad=True))

    plan, again = GraphPlan(graph(on)), graph(on)
    found = of_alike(plan, again)
    assert found is not None
    assert found.kept_keys == {*Graph(again).by_key(found.leaves)} != plan.kept_keys
    assert found.labels == plan.labels
    assert of_alike(plan, graph(on, (4, 3))) is None
    # Of a weight without a name it is not known that it is the same.
    product = lambda x: F.mean(F.affine(PF.affine(nn.Variable((2, 2)), 2, name="layer1"), x))  # noqa: E731
    plan = GraphPlan(graph(product))
    assert of_alike(plan, graph(product)) is None


def test_a_leaf_of_another_shape_is_another_leaf() -> None:
    x = nn.Variable((2, 3), need_grad=True)
    plan = GraphPlan(on(x))
    assert of_alike(plan, on(x)) is plan
    x.reset_shape((4, 3), True)
    assert of_alike(plan, on(x)) is None


def test_a_gradient_where_branches_meet_may_be_larger_than_each_contribution() -> None:
    h = PF.affine(nn.Variable((2, 3)), 4, name="a")
    loss = F.mean(F.sigmoid(h) + F.tanh(h))
    graph = Graph(loss)
    assert graph.positions[hash(h)] in GraphPlan(graph).largest_gradients


# Which weights can be swapped for a whole pass.


def swappable(loss: nn.Variable, **selected: Any) -> Set[Union[str, None]]:
    """The weights that can be, by name; None for all that are no parameters."""
    graph = Graph(loss)
    plan = GraphPlan(graph, LayerSelection(**selected))
    return {plan.names.get(graph.keys[position]) for position in plan.swappable}


def hidden(name: str = "a", **options: Any) -> nn.Variable:
    """A layer on another one: its weight is multiplied by a gradient that somebody wants."""
    h = F.tanh(PF.affine(nn.Variable((4, 3)), 3, name="first"))
    return PF.affine(h, 3, name=name, **options)


class SaysNothing(Gate):
    """A function of the user's that does not tell what its backward reads."""

    def grad_depends_input_data(self, i: int, j: int) -> bool:
        raise NotImplementedError


def constant(*shape: int) -> nn.Variable:
    return F.constant(0.5, shape)


# What else reads a layer's weight, and whether that can be swapped all the same.
READERS: Dict[str, Tuple[Callable[[nn.Variable], nn.Variable], bool]] = {
    "penalty": (lambda w: F.sum(w**2), False),
    "linear penalty": (lambda w: F.sum(F.transpose(w, (1, 0))) * 0.5, True),
    # nnabla says of a product that it reads both factors for the gradient of one.
    "weighed penalty": (lambda w: F.sum(w * constant(3, 3)), False),
    "squared sum": (lambda w: F.sum(w) ** 2, True),
    "the same layer": (lambda w: F.mean(PF.affine(F.tanh(hidden()), 3, name="a") ** 2), True),
    # What multiplies data computes no gradient that the weight is read for.
    "data": (lambda w: F.mean(F.affine(nn.Variable((4, 3)), w) ** 2), True),
    "itself": (lambda w: F.mean(F.affine(w, w) ** 2), False),
    # The gradient of a weight is that of the output, times the input.
    "layer": (lambda w: F.mean(PF.affine(w, 2, name="reader") ** 2), False),
    "frozen layer": (lambda w: F.mean(PF.affine(w, 2, name="reader", fix_parameters=True) ** 2), True),
    # nnabla reads it without saying so.
    "binary": (lambda w: F.mean(F.binary_connect_affine(w, leaf("b", 3, 3), nn.Variable((3, 3)))), False),
    "function in Python": (lambda w: F.mean(SaysNothing()(w)), False),
}


def leaf(name: str, *shape: int) -> nn.Variable:
    return PF.get_parameter_or_create(name, shape)


@pytest.mark.parametrize("reader", READERS)
def test_a_weight_can_be_swapped_where_only_its_layers_read_it(reader: str) -> None:
    read, can = READERS[reader]
    loss = F.mean(hidden() ** 2)
    assert "a/affine/W" in swappable(loss)
    loss = loss + read(nn.get_parameters()["a/affine/W"])
    assert ("a/affine/W" in swappable(loss)) == can


COMPUTED: Dict[str, Tuple[Callable[[nn.Variable], nn.Variable], bool]] = {
    "weight normalization": (lambda w: PF.weight_normalization(w, dim=1), True),
    "weight standardization": (lambda w: F.weight_standardization(w, channel_axis=1), True),
    "mask": (lambda w: F.mul2(w, constant(*w.shape)), True),
    "trained mask": (lambda w: F.mul2(w, leaf("mask", *w.shape)), True),
    "constant": (lambda w: w * 2.0, True),
    "sine": (lambda w: F.sin(w), True),
    # They compute their gradients from what they have written.
    "tanh": (lambda w: F.tanh(w), False),
    "exponential": (lambda w: F.exp(w), False),
    "softmax": (lambda w: F.softmax(w), False),
    "rectified in place": (lambda w: F.relu(w * 1.0, inplace=True), False),
}


@pytest.mark.parametrize("how", COMPUTED)
def test_a_computed_weight_can_be_swapped_where_its_function_does_not_read_it(how: str) -> None:
    apply, can = COMPUTED[how]
    # No parameter itself: nothing is known of it but where it is.
    assert swappable(F.mean(hidden(apply_w=apply) ** 2)) == ({None} if can else set())
    # Nor does it matter where nobody wants the gradient of what it is computed from.
    nn.clear_parameters()
    assert swappable(F.mean(hidden(apply_w=apply, fix_parameters=True) ** 2)) >= ({None} if can else set())


@pytest.mark.parametrize("other", [True, False])
def test_a_frozen_weight_is_read_by_nobody_who_computes_it(other: bool) -> None:
    computed = F.tanh(nn.Variable((3, 3)))
    h = F.affine(PF.affine(nn.Variable((4, 3)), 3, name="first"), computed)
    assert swappable(F.mean(h**2) + (F.sum(F.exp(computed)) if other else 0.0)) == {None}


@pytest.mark.parametrize("transposed", [True, False])
def test_a_table_is_not_a_weight_but_its_transpose_is(transposed: bool) -> None:
    ids = nn.Variable.from_numpy_array(np.array([[1, 2, 1], [0, 3, 3]]))
    table = leaf("table", 5, 4 if transposed else 5)
    h = F.tanh(PF.affine(F.mean(F.embed(ids, table), axis=1), table.shape[1], name="a"))
    logits = F.affine(h, F.transpose(table, (1, 0)) if transposed else table)
    # The gradient of a table has its rows, and that of a transposed one is transposed: neither reads it.
    assert swappable(F.mean(logits**2)) == {"a/affine/W", None if transposed else "table"}


@pytest.mark.parametrize("frozen", [True, False])
def test_a_weight_that_another_layer_reads_can_be_swapped_only_if_that_is_scaled_too(frozen: bool) -> None:
    h = F.tanh(hidden(fix_parameters=frozen))
    loss = F.mean(PF.affine(h, 3, name="a", fix_parameters=frozen) ** 2)
    layers = GraphPlan(loss).layers
    assert len(layers) == 2
    assert len(swappable(loss)) == 1
    if not frozen:
        assert all(swappable(loss, exclude=(name,)) == set() for name in layers)


@pytest.mark.parametrize(
    ("kind", "others"), [("scores", set()), ("activation", set()), ("data", {None}), ("parameter", {"p"})]
)
def test_a_leaf_alone_of_a_product_of_activations_can_be_swapped(kind: str, others: Any) -> None:
    h = PF.affine(F.tanh(PF.affine(nn.Variable((2, 4, 3)), 3, base_axis=2, name="first")), 3, 2, name="a")
    if kind == "scores":
        other = F.softmax(F.batch_matmul(h, F.tanh(h), transpose_b=True))
    elif kind == "activation":
        other = F.transpose(h * constant(2, 4, 3), (0, 2, 1))
    else:
        other = leaf("p", 1, 4, 4) if kind == "parameter" else nn.Variable((2, 4, 4))
    assert swappable(F.mean(F.batch_matmul(other, h) ** 2)) == {"a/affine/W", *others}
