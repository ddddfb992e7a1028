# SPDX-License-Identifier: Apache-2.0
"""Graphs as they are read: nnabla's order, and descriptions that are equal where plans are."""

from __future__ import annotations

import gc
from typing import Any, Dict, List, Tuple

import hypothesis.strategies as st
import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from nnabla_adaloss.graph.names import registered_names
from nnabla_adaloss.graph.plan import GraphPlan
from nnabla_adaloss.graph.reading import GraphDescription, read_graph, visited
from tests.engine.random_graphs import Network, build, chosen_steps, networks, seeds


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(networks)
def test_what_functions_read_and_write_is_told_by_position(network: Network) -> None:
    reading = read_graph(network.loss)
    inputs, outputs = reading.described.inputs.by_function(), reading.described.outputs.by_function()
    for f, read, written in zip(reading.functions, inputs, outputs):
        assert [hash(v) for v in f.inputs] == [reading.keys[p] for p in read]
        assert [hash(v) for v in f.outputs] == [reading.keys[p] for p in written]
    assert [hash(v) for v in reading.variables] == reading.keys


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(seeds, chosen_steps, st.booleans())
def test_a_graph_that_is_built_again_has_the_plan_that_it_would_get(
    seed: int, steps: List[str], input_gradient: bool
) -> None:
    first = build(seed, steps, input_gradient=input_gradient)
    again = build(seed, steps, input_gradient=input_gradient, known=first.leaves)
    names = {hash(leaf): f"scope/{name}" for name, leaf in first.leaves.items()}
    known, reading = GraphPlan(first.loss, names=names), read_graph(again.loss)
    assert reading.description(names) == known.structure.described
    bound, made = GraphPlan.bound(reading, known.structure), GraphPlan(again.loss, names=names)
    assert str(bound) == str(made) == str(known)
    assert [*bound.nodes] == [*made.nodes]
    for node, own in zip(bound.nodes.values(), made.nodes.values()):
        assert vars(node) == {**vars(own), "structure": node.structure}
        assert node.structure == own.structure
    for name in (
        "roots",
        "variables",
        "variable_keys",
        "kept_keys",
        "leaves",
        "fixed_leaves",
        "keys",
        "labels",
        "names",
        "readers",
    ):
        assert getattr(bound, name) == getattr(made, name)


def network(
    *,
    slope: float = 0.1,
    inplace: bool = False,
    recompute: bool = False,
    shape: Tuple[int, int] = (4, 3),
    second: str = "b",
    skip: str = "h",
    frozen: bool = False,
    named: bool = True,
    stop: bool = False,
    backend: str = "cpu:float",
) -> GraphDescription:
    """A small network with everything that can be told apart, in the parameters that are there."""
    with nn.context_scope(nn.Context([backend, "cpu:float"])):
        x = nn.Variable(shape)
        h = PF.affine(x, 3, name="a")
        if stop:
            h.need_grad = False
        activated = F.leaky_relu(h, slope, inplace=inplace)
        activated.recompute = recompute
        y = F.tanh(PF.affine(activated, 3, name=second, fix_parameters=frozen))
        loss = F.mean(y + {"h": h, "x": x, "activated": activated}[skip])
    return read_graph(loss).description(registered_names() if named else {})


@pytest.mark.parametrize(
    "changed",
    [
        {"slope": 0.2},
        {"inplace": True},
        {"recompute": True},
        {"shape": (5, 3)},
        {"second": "other parameters"},
        {"second": "a"},
        {"skip": "x"},
        {"skip": "activated"},
        {"frozen": True},
        {"named": False},
        {"stop": True},
        {"backend": "cpu:half"},
    ],
    ids=str,
)
def test_what_plans_depend_on_is_told_apart(changed: Dict[str, Any]) -> None:
    assert network() == network() != network(**changed)


def test_a_graph_is_described_before_forward_as_after_it() -> None:
    found = []
    for halfway in (False, True):
        x = nn.Variable((2, 3))
        x.d = 1.0
        h = F.tanh(PF.affine(x, 3, name="a"))
        if halfway:
            h.forward()
        loss = F.mean(PF.affine(F.sigmoid(h), 2, name="b")) + F.mean(h)
        found.append(read_graph(loss).description(registered_names()))
        loss.forward()
        found.append(read_graph(loss).description(registered_names()))
    assert all(described == found[0] for described in found)


def test_what_is_noticed_and_what_is_not() -> None:
    x = nn.Variable.from_numpy_array(np.ones((2, 3), np.float32), need_grad=True)
    h = F.tanh(x)
    y = F.sum(h)
    reading = read_graph(y)
    y.forward(clear_no_need_grad=True)
    y.backward(clear_buffer=True)
    x.d = 2.0
    x.grad.zero()
    assert reading.is_current
    for v in reading.variables[:2]:
        v.need_grad = False
        assert not reading.is_current
        assert not reading.rewired
        v.need_grad = True
        assert reading.is_current
    h.recompute = True
    assert not reading.is_current
    h.recompute = False
    assert reading.is_current
    h.rewire_on(F.sigmoid(x))
    assert reading.rewired
    assert not reading.is_current


def test_a_loss_that_stands_for_another_is_noticed() -> None:
    x = nn.Variable((2, 3), need_grad=True)
    loss = F.sum(F.tanh(x))
    reading = read_graph(loss)
    loss.rewire_on(F.sum(F.sigmoid(x)))
    assert reading.rewired


def test_a_function_that_needs_a_gradient_since_the_last_forward() -> None:
    x = nn.Variable((2, 3))
    x.d = 0.0
    h = F.tanh(x)
    h.need_grad = True
    x.need_grad = True
    reading = read_graph(h)
    h.forward()
    assert reading.marked_otherwise
    assert not reading.rewired


def test_another_shape_is_noticed_of_data_alone() -> None:
    x, w = nn.Variable((2, 3)), nn.Variable((1, 3), need_grad=True)
    plan = GraphPlan(F.sum(x * w), names={hash(w): "w"})
    w.reset_shape((1, 5), force=True)
    assert not plan.reshaped
    x.reset_shape((4, 3), force=True)
    assert plan.reshaped
    assert plan.reading.is_current


# Functions are visited as nnabla visits them, and nothing of them is kept.


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(networks)
def test_functions_come_in_the_order_of_forward(network: Network) -> None:
    expected: List[Any] = []
    network.loss.visit(expected.append)
    found = visited(network.loss)
    assert list(map(hash, found[0])) == list(map(hash, expected))
    for f, inputs, parents in zip(*found):
        assert list(map(hash, inputs)) == list(map(hash, f.inputs))
        assert parents == [v.parent for v in f.inputs]


def test_nothing_is_left_to_the_garbage_collector() -> None:
    loss = F.mean(F.tanh(nn.Variable((2, 3), need_grad=True)))
    # What other tests left behind may take several rounds: nnabla lets go of Python's objects in between.
    for _ in range(10):
        if not gc.collect():
            break
    gc.disable()
    try:
        visited(loss)
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_deep_graphs_are_visited_without_recursion() -> None:
    h = nn.Variable((1,), need_grad=True)
    for _ in range(5000):
        h = F.identity(h)
    assert len(visited(h)[0]) == 5000
