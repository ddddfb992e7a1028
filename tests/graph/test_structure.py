# SPDX-License-Identifier: Apache-2.0
"""Structures of graphs that differ in shapes."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Dict, Tuple

import hypothesis.strategies as st
import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import pytest
from hypothesis import HealthCheck, given, settings

from nnabla_adaloss.core.layer_selection import LayerSelection
from nnabla_adaloss.graph.names import registered_names
from nnabla_adaloss.graph.reading import GraphDescription, read_graph
from nnabla_adaloss.graph.structure import GraphStructure, PlanOptions
from tests.engine.random_graphs import WIDTH, build, seeds

OPTIONS = PlanOptions(LayerSelection(), True, frozenset())
# Those that take batches of any size.
ANY_BATCH = ["affine", "shared", "tied", "tanh", "relu", "add", "multiply", "prelu", "batch_normalization"]


def described(loss: nn.Variable) -> GraphDescription:
    return read_graph(loss).description(registered_names())


def structure_of(loss: nn.Variable) -> GraphStructure:
    return GraphStructure(described(loss), OPTIONS, read_graph(loss))


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
    found = structure.of_alike(wanted)
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
    found, made = structure.of_alike(wanted), structure_of(longer)
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
    found = structure.of_alike(wanted)
    assert found is not None
    assert found.fixed == structure_of(other).fixed != before


@pytest.mark.parametrize("written_first", [False, True])
def test_a_leaf_that_one_of_its_readers_writes_is_written(written_first: bool) -> None:
    state = nn.Variable((2, 3))
    terms = [F.mean(F.assign(state, nn.Variable((2, 3), need_grad=True) * 2.0)), F.mean(F.tanh(state))]
    reading = read_graph(F.add2(*(terms if written_first else terms[::-1])))
    structure = GraphStructure(reading.description({}), OPTIONS, reading)
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
    assert structure.of_alike(described(network())) is structure
    assert structure.of_alike(described(network(batch=7))) is not None
    assert structure.of_alike(described(other())) is None


def test_a_leaf_of_another_shape_is_another_leaf() -> None:
    x = nn.Variable((2, 3), need_grad=True)

    def loss() -> nn.Variable:
        return F.mean(PF.affine(x, 3, name="layer0") ** 2)

    structure = structure_of(loss())
    assert structure.of_alike(described(loss())) is structure
    x.reset_shape((4, 3), True)
    assert structure.of_alike(described(loss())) is None


def test_what_has_one_element_is_another_matter_for_scales() -> None:
    """Functions of one element at the loss can take any scale."""
    structure = structure_of(taps(last=(1,)))
    assert structure.of_alike(described(taps(last=(0, 1)))) is None
    assert structure.of_alike(described(taps(last=(0,)))) is not None


def test_where_branches_meet_a_gradient_may_be_larger_than_those_that_arrive() -> None:
    h = PF.affine(nn.Variable((2, 3)), 4, name="a")
    loss = F.mean(F.sigmoid(h) + F.tanh(h))
    reading = read_graph(loss)
    structure = GraphStructure(reading.description({}), OPTIONS, reading)
    assert reading.keys.index(hash(h)) in structure.largest_gradients


def test_what_can_be_largest_goes_by_the_batch() -> None:
    bias = nn.parameter.get_parameter_or_create("b", (1, 5), need_grad=True)

    def structure(batch: int) -> GraphStructure:
        h = F.tanh(PF.affine(nn.Variable((batch, 3)), 5, name="a"))
        return structure_of(F.mean(F.sigmoid(h + F.tanh(bias))))

    one, four = structure(1), structure(4)
    before = one.largest_gradients
    found = one.of_alike(four.described)
    assert found is not None
    assert found.largest_gradients == four.largest_gradients != before
