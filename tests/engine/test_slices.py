# SPDX-License-Identifier: Apache-2.0
"""Slices of the arrays of a graph: together they are all arrays, and each is about as large as the others."""

from __future__ import annotations

import math
from typing import Any, List

import hypothesis.strategies as st
import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import pytest
from hypothesis import HealthCheck, given, settings

from nnabla_adaloss.engine import slices
from nnabla_adaloss.engine.latest_statistics import StatisticsRequest
from nnabla_adaloss.engine.slices import Slice, empty_slices, slices_of
from nnabla_adaloss.graph.plan import GraphPlan
from tests.worlds.networks import layers
from tests.worlds.random_graphs import Network, networks
from tests.worlds.values import FLOAT, HALF


def divided(plan: GraphPlan, count: int) -> List[Slice]:
    """The slices where choices ask for everything, however little there is."""
    data = frozenset(slot.weight for node in plan.nodes for slot in node.layer_inputs)
    wanted = StatisticsRequest(frozenset(plan.gradients), data, watched=frozenset())
    empty = Slice((), (), (), frozenset(), last=False)
    return [one or empty for one in slices_of(plan, wanted, count, rounds=False)]


@pytest.mark.parametrize("least", [1, 2**16])
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(network=networks, count=st.integers(1, 9))
def test_all_that_is_wanted_is_in_exactly_one_slice(least: int, network: Network, count: int) -> None:
    plan = GraphPlan(network.loss, names={})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(slices, "_LEAST", least)
        found = divided(plan, count)
        assert found == divided(plan, count)
        # Slices that must be empty are.
        empty = empty_slices(plan, count, rounds=False)
        assert not any(any(one[:4]) for one in found[:empty])
        assert least == 1 or empty == count - 1
    assert [one.last for one in found] == [*(count - 1) * [False], True]
    # What is little is measured right before the next choice.
    assert least == 1 or not any(any(one[:4]) for one in found[:-1])
    factors = {slot.weight for node in plan.nodes for slot in node.layer_inputs}
    for field, wanted in (
        ("gradients", set(plan.gradients) - set(plan.roots)),
        ("weights", factors & plan.described.kept.keys()),
        ("activations", factors - plan.described.kept.keys()),
        ("leaves", {p for node in plan.nodes for p in node.leaves}),
    ):
        assert sorted(p for one in found for p in getattr(one, field)) == sorted(wanted)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_slices_are_even_but_for_one_array(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "_LEAST", 1)
    plan = GraphPlan(F.mean(layers(1, 100, 3, 7, 50, 20, 9, 2) ** 2))
    sizes = [math.prod(shape) for shape in plan.described.shapes]
    for field in ("gradients", "weights", "leaves"):
        parts = [list(getattr(one, field)) for one in divided(plan, count)]
        filled = [sum(sizes[p] for p in part) for part in parts]
        largest = max(sizes[p] for part in parts for p in part)
        # What is memory: no slice is much larger than an even one, but for a single array.
        assert max(filled) <= max(1.01 * sum(filled) / count, largest)


@pytest.mark.parametrize(
    ("context", "rounds", "everywhere"), [(FLOAT, False, 0), (FLOAT, True, 4), (HALF, False, 4)]
)
def test_leaves_in_half_count_in_every_pass(context: Any, rounds: bool, everywhere: int) -> None:
    with nn.context_scope(context):
        h = F.tanh(PF.affine(nn.Variable((4, 3)), 5, name="a"))
        plan = GraphPlan(F.mean(PF.affine(h, 2, name="b") ** 2))
    wanted = StatisticsRequest(frozenset(), frozenset(), watched=frozenset())
    found = slices_of(plan, wanted, 3, rounds=rounds)
    assert [0 if one is None else len(one.leaves) for one in found] == [everywhere, everywhere, 4]
    assert empty_slices(plan, 3, rounds=rounds) == (0 if everywhere else 2)
