# SPDX-License-Identifier: Apache-2.0
"""Graphs are visited as nnabla visits them, and nothing of them is kept."""

from __future__ import annotations

import gc
from typing import Any, List

import nnabla as nn
import nnabla.functions as F
from hypothesis import HealthCheck, given, settings

from nnabla_adaloss.graph.order import visited
from tests.engine.random_graphs import Network, networks


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(networks)
def test_functions_come_in_the_order_of_forward(network: Network) -> None:
    expected: List[Any] = []
    network.loss.visit(expected.append)
    found = visited(network.loss)
    assert list(map(hash, found.functions)) == list(map(hash, expected))
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
    assert len(visited(h).functions) == 5000
