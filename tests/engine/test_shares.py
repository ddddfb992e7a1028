# SPDX-License-Identifier: Apache-2.0
"""Which arrays each iteration measures: in the end all of them, in even shares."""

from __future__ import annotations

import math
from collections import Counter
from typing import List, Sequence

import hypothesis.strategies as st
import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import pytest
from hypothesis import HealthCheck, given, settings

from nnabla_adaloss.engine import statistics as shares
from nnabla_adaloss.engine.statistics import Share, shares_of
from nnabla_adaloss.graph.plan import GraphPlan
from nnabla_adaloss.graph.structure import GraphStructure
from tests.engine.random_graphs import Network, networks

LITTLE = 2**16


def sizes_of(structure: GraphStructure) -> List[int]:
    return [math.prod(shape) for shape in structure.described.shapes]


def divided(structure: GraphStructure, count: int) -> List[Share]:
    """The shares where choices ask for everything."""
    gradients = set(structure.gradients)
    data = {slot.factor for node in structure.nodes for slot in node.slots}
    return shares_of(structure, gradients, data, count)


def each_once(parts: Sequence[Sequence[int]]) -> bool:
    return all(times == 1 for times in Counter(p for part in parts for p in part).values())


@pytest.mark.parametrize("least", [1, LITTLE])
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(network=networks, count=st.integers(1, 9))
def test_all_that_is_wanted_is_in_exactly_one_share(least: int, network: Network, count: int) -> None:
    structure = GraphPlan(network.loss, names={}).structure
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shares, "_LEAST", least)
        found = divided(structure, count)
        again = divided(structure, count)
    assert found == again
    assert len(found) == count
    assert [share.last for share in found] == [*(count - 1) * [False], True]
    factors = {slot.factor for node in structure.nodes for slot in node.slots}
    leaves = {p for node in structure.nodes for p in node.leaves}
    for parts, wanted in (
        ([share.gradients for share in found], set(structure.gradients) - set(structure.roots)),
        ([share.weights for share in found], factors & structure.described.kept.keys()),
        ([share.activations for share in found], factors - structure.described.kept.keys()),
        ([list(share.leaves) for share in found], leaves),
    ):
        assert each_once(parts)
        assert {p for part in parts for p in part} == wanted
    assert all(share.empty == (not any(share[:4])) for share in found)


def of_widths(*widths: int, rows: int = 4) -> GraphStructure:
    h = nn.Variable((rows, widths[0]), need_grad=True)
    for index, width in enumerate(widths):
        h = F.tanh(PF.affine(h, width, name=f"layer{index}"))
    return GraphPlan(F.mean(h**2)).structure


@pytest.mark.parametrize("widths", [(8, 8, 8, 8, 8, 8), (1, 100, 3, 7, 50, 20, 9, 2)])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_shares_are_even_but_for_one_array(
    widths: Sequence[int], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "_LEAST", 1)
    structure = of_widths(*widths)
    sizes = sizes_of(structure)
    for field in ("gradients", "weights", "leaves"):
        parts = [list(getattr(share, field)) for share in divided(structure, count)]
        filled = [sum(sizes[p] for p in part) for part in parts]
        largest = max(sizes[p] for part in parts for p in part)
        # What is memory: no share is larger than an even one by more than an array.
        assert max(filled) <= sum(filled) / count + largest
        assert max(filled) - min(filled) <= largest


def test_small_shares_are_put_together_before_the_next_choice() -> None:
    found = divided(of_widths(8, 8, 8), 4)
    assert [share.empty for share in found] == [True, True, True, False]
    nn.clear_parameters()
    # Of 2 * 2^16 elements and a bit, two shares are made.
    structure = of_widths(64, 64, rows=512)
    sizes = sizes_of(structure)
    filled = [sum(sizes[p] for p in share.gradients) for share in divided(structure, 4)]
    assert filled[:2] == [0, 0]
    assert min(filled[2:]) >= 2**16 - 512 * 64
    assert max(filled[2:]) <= 2 * 2**16


def test_only_what_choices_have_asked_for_is_measured() -> None:
    structure = of_widths(3, 4, 5)
    asked = set(structure.gradients[2:4])
    (share,) = shares_of(structure, asked, set(), 1)
    assert set(share.gradients) == asked
    assert not share.weights
    assert not share.activations
    # Leaves are looked at anyway, where they are unscaled.
    assert set(share.leaves) == set(structure.leaves)
    (nothing,) = shares_of(structure, set(structure.roots), set(), 1)
    assert not nothing.gradients


def test_where_an_activation_is_multiplied_its_data_are_measured_apart() -> None:
    x = nn.Variable((2, 3, 4))
    q, k = (PF.affine(x, 5, base_axis=2, name=name) for name in "qk")
    plan = GraphPlan(F.mean(F.batch_matmul(q, k, transpose_b=True)))
    (share,) = divided(plan.structure, 1)
    assert set(share.activations) == {plan.positions[hash(v)] for v in (q, k)}
    assert not share.weights
