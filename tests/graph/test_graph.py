# SPDX-License-Identifier: Apache-2.0
"""Graphs as they are read: in nnabla's order, and current until they are wired or marked otherwise."""

from __future__ import annotations

from typing import Any, List

import nnabla as nn
import nnabla.functions as F
import numpy as np
from hypothesis import HealthCheck, given, settings

from nnabla_adaloss.graph.description import visited
from nnabla_adaloss.graph.graph import Graph
from tests.worlds.random_graphs import Network, networks


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(networks)
def test_functions_come_in_forward_order_with_their_inputs_and_outputs(network: Network) -> None:
    expected: List[Any] = []
    network.loss.visit(expected.append)
    functions, read, parents = visited(network.loss)
    graph = Graph(network.loss)
    assert [*map(hash, functions)] == [*map(hash, graph.functions)] == [*map(hash, expected)]
    assert [*map(hash, graph.variables)] == graph.keys
    inputs, outputs = graph.described.inputs.by_function(), graph.described.outputs.by_function()
    for index, f in enumerate(functions):
        assert [*map(hash, f.inputs)] == [*map(hash, read[index])] == [graph.keys[p] for p in inputs[index]]
        assert [*map(hash, f.outputs)] == [graph.keys[p] for p in outputs[index]]
        assert parents[index] == [v.parent for v in f.inputs]


def test_changes_that_are_noticed_and_those_that_are_not() -> None:
    x = nn.Variable.from_numpy_array(np.ones((2, 3), np.float32), need_grad=True)
    h = F.tanh(x)
    y = F.sum(h)
    graph = Graph(y)
    y.forward(clear_no_need_grad=True)
    y.backward(clear_buffer=True)
    x.d = 2.0
    x.grad.zero()
    assert graph.is_current
    for v in graph.variables[:2]:
        v.need_grad = False
        assert not graph.is_current
        assert not graph.rewired
        v.need_grad = True
        assert graph.is_current
    h.recompute = True
    assert not graph.is_current
    h.recompute = False
    assert graph.is_current
    for rewired, other in ((h, F.sigmoid(x)), (y, F.sum(F.sigmoid(x)))):
        graph = Graph(y)
        rewired.rewire_on(other)
        assert graph.rewired
        assert not graph.is_current


def test_a_function_that_needs_a_gradient_since_the_last_forward() -> None:
    x = nn.Variable((2, 3))
    x.d = 0.0
    h = F.tanh(x)
    h.need_grad = True
    x.need_grad = True
    graph = Graph(h)
    h.forward()
    assert graph.marked_otherwise
    assert not graph.rewired
