# SPDX-License-Identifier: Apache-2.0
"""Structures of graphs that differ in shapes."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Callable, Dict, Set, Tuple, Union

import hypothesis.strategies as st
import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from nnabla_adaloss.core.layer_selection import LayerSelection
from nnabla_adaloss.graph.description import GraphDescription
from nnabla_adaloss.graph.names import registered_names
from nnabla_adaloss.graph.plan import GraphPlan
from nnabla_adaloss.graph.structure import GraphStructure, PlanOptions
from tests.worlds.random_graphs import STEPS, WIDTH, build, seeds
from tests.worlds.tampering import Tampering

OPTIONS = PlanOptions(LayerSelection(), True, frozenset())
# Those that take batches of any size.
ANY_BATCH = ["affine", "shared", "tied", "tanh", "relu", "add", "multiply", "prelu", "batch_normalization"]


def described(loss: nn.Variable) -> GraphDescription:
    return GraphPlan.read(loss).description(registered_names())


def structure_of(loss: nn.Variable) -> GraphStructure:
    graph = GraphPlan.read(loss)
    return GraphStructure(described(loss), OPTIONS, graph.functions, graph.all_leaves)


def facts(structure: GraphStructure) -> Dict[str, Any]:
    # Leaves are held by the one that was made first, and what is asked for is kept when it was.
    asked = {name for name, value in vars(GraphStructure).items() if isinstance(value, cached_property)}
    return {k: v for k, v in vars(structure).items() if k not in asked | {"_held", "_components"}}


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(seeds, st.lists(st.sampled_from(ANY_BATCH), max_size=6), st.integers(2, 6), st.integers(2, 6))
def test_a_reshaped_structure_is_what_would_have_been_made(
    seed: int, steps: Any, first: int, second: int
) -> None:
    one = build(seed, steps, input_gradient=False, batch=(first, WIDTH))
    other = build(seed, steps, input_gradient=False, batch=(second, WIDTH), known=one.leaves)
    structure, wanted = structure_of(one.loss), described(other.loss)
    found = structure.of_alike(wanted, OPTIONS)
    assert found is not None
    assert facts(found) == facts(structure_of(other.loss))
    assert (found is structure) == (first == second)


def attention(length: int) -> nn.Variable:
    x = nn.Variable((2, length, 4))
    rows = PF.affine(x, 4, base_axis=2, name="a")
    scores = F.softmax(F.batch_matmul(rows, rows * 2.0, transpose_b=True))
    return F.mean(F.reshape(F.batch_matmul(scores, rows), (2 * length, 4)) ** 2)


def test_what_follows_from_lengths_is_found_out_anew() -> None:
    longer = attention(5)
    structure, wanted = structure_of(attention(3)), described(longer)
    asked = [name for name, value in vars(GraphStructure).items() if isinstance(value, cached_property)]
    assert all(getattr(structure, name) is not None for name in asked)
    found, made = structure.of_alike(wanted, OPTIONS), structure_of(longer)
    assert found is not None
    assert facts(found) == facts(made)
    assert [getattr(found, name) for name in asked] == [getattr(made, name) for name in asked]
    before, now = (
        [slot.slot.fan_in for node in one.nodes for slot in node.slots if node.type_name == "BatchMatmul"]
        for one in (structure, found)
    )
    assert before == [4.0, 3.0, 3.0, 3.0]
    assert now == [4.0, 5.0, 5.0, 5.0]


def test_which_leaves_forward_writes_is_a_matter_of_arguments() -> None:
    def normalized(batch_stat: bool) -> nn.Variable:
        h = PF.affine(nn.Variable((4, 3)), 3, name="a")
        return F.mean(PF.batch_normalization(h, batch_stat=batch_stat, name="bn") ** 2)

    other = normalized(False)
    structure, wanted = structure_of(normalized(True)), described(other)
    before = structure.fixed
    found = structure.of_alike(wanted, OPTIONS)
    assert found is not None
    assert found.fixed == structure_of(other).fixed != before


@pytest.mark.parametrize("written_first", [False, True])
def test_a_leaf_that_one_of_its_readers_writes_is_written(written_first: bool) -> None:
    state = nn.Variable((2, 3))
    terms = [F.mean(F.assign(state, nn.Variable((2, 3), need_grad=True) * 2.0)), F.mean(F.tanh(state))]
    reading = GraphPlan.read(F.add2(*(terms if written_first else terms[::-1])))
    structure = GraphStructure(reading.description({}), OPTIONS, reading.functions, reading.all_leaves)
    assert structure.fixed[reading.keys.index(hash(state))]


def network(*, depth: int = 2, batch: int = 4, activation: Any = F.tanh, frozen: bool = False) -> nn.Variable:
    h = nn.Variable((batch, 3))
    for index in range(depth):
        h = activation(PF.affine(h, 3, name=f"layer{index}"))
    if frozen:
        h.need_grad = False
    return F.mean(PF.affine(h, 1, name="last") ** 2)


def taps(*, last: Tuple[int, ...]) -> nn.Variable:
    return F.mean(F.sum(PF.affine(nn.Variable((2, 3)), 4, name="layer0"), axis=last) ** 2)


@pytest.mark.parametrize(
    "other",
    [
        lambda: network(depth=3),
        lambda: network(activation=F.relu),
        lambda: network(frozen=True),
        lambda: attention(3),
    ],
)
def test_graphs_that_are_wired_otherwise(other: Any) -> None:
    structure = structure_of(network())
    assert structure.of_alike(described(network()), OPTIONS) is structure
    assert structure.of_alike(described(network(batch=7)), OPTIONS) is not None
    assert structure.of_alike(described(other()), OPTIONS) is None


def test_a_leaf_of_another_shape_is_another_leaf() -> None:
    x = nn.Variable((2, 3), need_grad=True)

    def loss() -> nn.Variable:
        return F.mean(PF.affine(x, 3, name="layer0") ** 2)

    structure = structure_of(loss())
    assert structure.of_alike(described(loss()), OPTIONS) is structure
    x.reset_shape((4, 3), True)
    assert structure.of_alike(described(loss()), OPTIONS) is None


def test_what_has_one_element_is_another_matter_for_scales() -> None:
    """Functions of one element at the loss can take any scale."""
    structure = structure_of(taps(last=(1,)))
    assert structure.of_alike(described(taps(last=(0, 1))), OPTIONS) is None
    assert structure.of_alike(described(taps(last=(0,))), OPTIONS) is not None


def test_where_branches_meet_a_gradient_may_be_larger_than_those_that_arrive() -> None:
    h = PF.affine(nn.Variable((2, 3)), 4, name="a")
    loss = F.mean(F.sigmoid(h) + F.tanh(h))
    reading = GraphPlan.read(loss)
    structure = GraphStructure(reading.description({}), OPTIONS, reading.functions, reading.all_leaves)
    assert reading.keys.index(hash(h)) in structure.largest_gradients


def test_what_can_be_largest_goes_by_the_batch() -> None:
    bias = nn.parameter.get_parameter_or_create("b", (1, 5), need_grad=True)

    def structure(batch: int) -> GraphStructure:
        h = F.tanh(PF.affine(nn.Variable((batch, 3)), 5, name="a"))
        return structure_of(F.mean(F.sigmoid(h + F.tanh(bias))))

    one, four = structure(1), structure(4)
    before = one.largest_gradients
    found = one.of_alike(four.described, OPTIONS)
    assert found is not None
    assert found.largest_gradients == four.largest_gradients != before


# Which weights can be swapped for a whole pass.


def swappable(loss: nn.Variable, selection: LayerSelection = OPTIONS.selection) -> Set[Union[str, None]]:
    """The weights that can be, by name; None for all that are no parameters."""
    reading = GraphPlan.read(loss)
    found = GraphStructure(
        reading.description(registered_names()),
        OPTIONS._replace(selection=selection),
        reading.functions,
        reading.all_leaves,
    )
    return {registered_names().get(reading.keys[position]) for position in found.swappable}


def hidden(name: str = "a", **options: Any) -> nn.Variable:
    """A layer on another one: its weight is multiplied by a gradient that somebody wants."""
    h = F.tanh(PF.affine(nn.Variable((4, 3)), 3, name="first"))
    return PF.affine(h, 3, name=name, **options)


def weight(name: str = "a") -> nn.Variable:
    return nn.get_parameters(grad_only=False)[f"{name}/affine/W"]


def penalized() -> nn.Variable:
    y = hidden()
    return F.mean(y**2) + F.sum(weight() ** 2)


def with_a_linear_penalty() -> nn.Variable:
    y = hidden()
    return F.mean(y**2) + F.sum(F.transpose(weight(), (1, 0))) * 0.5


def weighed_element_by_element() -> nn.Variable:
    y = hidden()
    return F.mean(y**2) + F.sum(weight() * F.constant(0.5, (3, 3)))


def with_a_squared_gradient_of_the_sum() -> nn.Variable:
    y = hidden()
    return F.mean(y**2) + F.sum(weight()) ** 2


def used_by_two_layers() -> nn.Variable:
    return F.mean(PF.affine(F.tanh(hidden()), 3, name="a") ** 2)


def frozen_and_used_by_two_layers() -> nn.Variable:
    h = F.tanh(hidden(fix_parameters=True))
    return F.mean(PF.affine(h, 3, name="a", fix_parameters=True) ** 2)


def used_on_data_as_well() -> nn.Variable:
    data = nn.Variable((4, 3))
    return F.mean(hidden() ** 2) + F.mean(PF.affine(data, 3, name="a") ** 2)


def its_own_input() -> nn.Variable:
    y = hidden()
    return F.mean(y**2) + F.mean(F.affine(weight(), weight()) ** 2)


def input_of_another_layer() -> nn.Variable:
    y = hidden()
    return F.mean(y**2) + F.mean(PF.affine(weight(), 2, name="reader") ** 2)


def input_of_another_frozen_layer() -> nn.Variable:
    y = hidden()
    return F.mean(y**2) + F.mean(PF.affine(weight(), 2, name="reader", fix_parameters=True) ** 2)


@pytest.mark.parametrize(
    ("loss", "can"),
    [
        (lambda: F.mean(hidden() ** 2), True),
        (penalized, False),
        (with_a_linear_penalty, True),
        # nnabla says of a product that it reads both factors for the gradient of one.
        (weighed_element_by_element, False),
        (with_a_squared_gradient_of_the_sum, True),
        (used_by_two_layers, True),
        (frozen_and_used_by_two_layers, True),
        # What multiplies data computes no gradient that the weight is read for.
        (used_on_data_as_well, True),
        # The gradient of a weight is that of the output, times the input.
        (input_of_another_layer, False),
        (input_of_another_frozen_layer, True),
        (its_own_input, False),
    ],
)
def test_a_weight_can_be_swapped_where_only_its_layers_read_it(
    loss: Callable[[], nn.Variable], can: bool
) -> None:
    assert ("a/affine/W" in swappable(loss())) == can


COMPUTED: Dict[str, Tuple[Callable[[nn.Variable], nn.Variable], bool]] = {
    "weight normalization": (lambda w: PF.weight_normalization(w, dim=1), True),
    "weight standardization": (lambda w: F.weight_standardization(w, channel_axis=1), True),
    "mask": (lambda w: F.mul2(w, F.constant(1.0, w.shape)), True),
    "trained mask": (lambda w: F.mul2(w, PF.get_parameter_or_create("mask", w.shape)), True),
    "constant": (lambda w: w * 2.0, True),
    "sine": (lambda w: F.sin(w), True),
    # They compute their gradients from what they have written.
    "tanh": (lambda w: F.tanh(w), False),
    "exponential": (lambda w: F.exp(w), False),
    "softmax": (lambda w: F.softmax(w), False),
    "rectified in place": (lambda w: F.relu(w * 1.0, inplace=True), False),
}


@pytest.mark.parametrize("how", sorted(COMPUTED))
def test_a_computed_weight_can_be_swapped_where_its_function_does_not_read_it(how: str) -> None:
    apply, can = COMPUTED[how]
    loss = F.mean(hidden(apply_w=apply) ** 2)
    # No parameter itself: nothing is known of it but where it is.
    assert swappable(loss) == ({None} if can else set())
    # Nor does it matter where nobody wants the gradient of what it is computed from.
    nn.clear_parameters()
    assert swappable(F.mean(hidden(apply_w=apply, fix_parameters=True) ** 2)) >= ({None} if can else set())


@pytest.mark.parametrize("other", [True, False])
def test_a_frozen_weight_is_read_by_nobody_who_computes_it(other: bool) -> None:
    frozen = nn.Variable((3, 3))
    computed = F.tanh(frozen)
    h = F.affine(PF.affine(nn.Variable((4, 3)), 3, name="first"), computed)
    loss = F.mean(h**2) + (F.sum(F.exp(computed)) if other else 0.0)
    assert swappable(loss) == {None}


@pytest.mark.parametrize("transposed", [True, False])
def test_a_table_is_no_weight_and_what_is_transposed_from_it_is(transposed: bool) -> None:
    ids = nn.Variable.from_numpy_array(np.array([[1, 2, 1], [0, 3, 3]]))
    table = PF.get_parameter_or_create("table", (5, 4) if transposed else (5, 5))
    h = F.tanh(PF.affine(F.mean(F.embed(ids, table), axis=1), table.shape[1], name="a"))
    logits = F.affine(h, F.transpose(table, (1, 0)) if transposed else table)
    # The gradient of a table has its rows, and that of a transposed one is transposed: neither reads it.
    assert swappable(F.mean(logits**2)) == {"a/affine/W", None if transposed else "table"}


def test_a_weight_that_another_layer_reads_can_be_swapped_only_if_that_is_scaled_too() -> None:
    loss = used_by_two_layers()
    names = sorted(structure_of(loss).layer_slots)
    assert len(names) == 2
    assert swappable(loss) == {"a/affine/W"}
    for name in names:
        assert swappable(loss, LayerSelection(exclude=(name,))) == set()


def products(kind: str) -> nn.Variable:
    """A layer, and a product of what it has computed with something."""
    h = PF.affine(F.tanh(PF.affine(nn.Variable((2, 4, 3)), 3, base_axis=2, name="first")), 3, 2, name="a")
    other = {
        "scores": lambda: F.softmax(F.batch_matmul(h, F.tanh(h), transpose_b=True)),
        "activation": lambda: h * F.constant(0.5, (2, 4, 3)),
        "data": lambda: nn.Variable((2, 4, 4)),
        "parameter": lambda: PF.get_parameter_or_create("p", (1, 4, 4)),
    }[kind]()
    if kind == "activation":
        return F.mean(F.batch_matmul(h, other, transpose_a=True) ** 2)
    return F.mean(F.batch_matmul(other, h) ** 2)


@pytest.mark.parametrize("kind", ["scores", "activation"])
def test_activations_that_are_multiplied_by_each_other_are_never_swapped(kind: str) -> None:
    assert swappable(products(kind)) == {"a/affine/W"}


def test_of_a_product_with_a_leaf_the_leaf_can_be_swapped() -> None:
    assert swappable(products("parameter")) == {"a/affine/W", "p"}
    assert swappable(products("data")) == {"a/affine/W", None}


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(seeds, st.lists(st.sampled_from(sorted(STEPS)), max_size=6))
def test_whatever_is_swapped_nobody_else_reads(seed: int, steps: Any) -> None:
    loss = build(seed, steps, input_gradient=bool(seed % 2)).loss
    reading, structure = GraphPlan.read(loss), structure_of(loss)
    products = {(slot.factor, node.number) for node in structure.nodes for slot in node.slots}
    for position in structure.swappable:
        others = {i for i in structure.order if (position, i) not in products}
        assert not any(reading.described.reads(reading.functions[index], index, position) for index in others)
    for factor, _ in products:
        if factor not in structure.swappable:
            own = [
                i
                for i in structure.order
                if (factor, i) not in products and reading.described.reads(reading.functions[i], i, factor)
            ]
            kinds = {structure.by_number[number].type_name for f, number in products if f == factor}
            assert own or kinds == {"BatchMatmul"}


def test_of_a_known_topology_the_same_can_be_swapped() -> None:
    structure, longer = structure_of(attention(3)), attention(5)
    found = structure.of_alike(described(longer), OPTIONS)
    assert found is not None
    assert found.swappable == structure_of(longer).swappable
    assert found.joined == structure_of(longer).joined


@pytest.mark.parametrize("kind", ["affine", "convolution"])
def test_a_weight_is_not_swapped_that_nnabla_reads_without_saying_so(kind: str) -> None:
    nn.clear_parameters()
    shapes = {"affine": ((6, 6), (6, 3)), "convolution": ((3, 3, 5, 5), (2, 3, 3, 3))}[kind]
    w, binary = (nn.parameter.get_parameter_or_create(n, s) for n, s in zip("wb", shapes))
    signs = nn.Variable(shapes[1])
    if kind == "affine":
        h = F.affine(PF.affine(nn.Variable((4, 3)), 6, name="first"), w)
        other = F.binary_connect_affine(w, binary, signs)
    else:
        h = F.convolution(PF.convolution(nn.Variable((2, 1, 9, 9)), 3, (3, 3), name="first"), w)
        other = F.binary_connect_convolution(w, binary, signs)
    assert not other.parent.grad_depends_input_data(1, 0)
    reading = GraphPlan.read(F.mean(F.sigmoid(h)) + F.mean(F.sigmoid(other)))
    structure = GraphStructure(
        reading.description(registered_names()), OPTIONS, reading.functions, reading.all_leaves
    )
    assert reading.keys.index(hash(w)) not in structure.swappable


class SaysNothing(Tampering):
    """A function of the user's that does not tell what its backward reads."""

    def changed(self, g: np.ndarray) -> np.ndarray:
        return g

    def grad_depends_input_data(self, i: int, j: int) -> bool:
        raise NotImplementedError


def test_a_weight_is_not_swapped_that_a_function_of_the_users_may_read() -> None:
    nn.clear_parameters()
    w = nn.parameter.get_parameter_or_create("w", (6, 6))
    h = F.affine(PF.affine(nn.Variable((4, 3)), 6, name="first"), w)
    function = SaysNothing()
    reading = GraphPlan.read(F.mean(F.sigmoid(h)) + F.mean(function(w)))
    structure = GraphStructure(
        reading.description(registered_names()), OPTIONS, reading.functions, reading.all_leaves
    )
    assert structure.swappable == frozenset()
