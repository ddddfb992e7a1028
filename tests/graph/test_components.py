# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Dict, List, Optional, Set

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import pytest
from hypothesis import HealthCheck, given, settings

from nnabla_adaloss import AdaptiveLossScaling
from tests.engine.random_graphs import Network, networks
from tests.engine.test_architectures import NETWORKS


class Found:
    """The components of a loss; variables go by themselves."""

    def __init__(self, loss: nn.Variable, *, by_layer: bool = True) -> None:
        plan = AdaptiveLossScaling(loss).plan
        self._positions = plan.positions
        self.components = plan.structure.components(by_layer=by_layer)
        self.names, self.single = self.components.names, self.components.single

    def __contains__(self, variable: nn.Variable) -> bool:
        return self._positions[hash(variable)] in self.components.of

    def of(self, *variables: nn.Variable) -> List[int]:
        return [self.components.of[self._positions[hash(v)]] for v in variables]

    def name(self, variable: nn.Variable) -> str:
        return self.names[self.of(variable)[0]]

    def layers(self, before: nn.Variable, after: nn.Variable) -> List[Optional[str]]:
        """The layers that lead from one to the other; None for what is no layer."""
        ends = tuple(self.of(before, after))
        return [e.layer for e in self.components.edges if (e.before, e.after) == ends]


def together(found: Found, *variables: nn.Variable) -> bool:
    return len(set(found.of(*variables))) == 1


def test_layers_separate() -> None:
    x = nn.Variable((4, 8))
    h = [PF.affine(x, 8, name="a")]
    for name in "bc":
        h += [F.tanh(h[-1])]
        h += [PF.affine(h[-1], 8, name=name)]
    loss = F.mean(h[-1] ** 2)
    found = Found(loss)
    assert together(found, h[0], h[1])
    assert together(found, h[2], h[3])
    assert len(set(found.of(loss, h[4], h[3], h[1]))) == 4
    assert found.layers(h[4], h[3]) == ["c/affine"]
    assert not found.layers(h[4], h[1])
    assert found.components.governed == {*found.of(loss, h[4])}
    # The data need no gradient: three layers, two components behind the one at the loss, and the loss's own.
    assert len(found.names) == 4
    assert found.name(loss) in found.single
    plain = Found(loss, by_layer=False)
    assert together(plain, *h)
    assert len(plain.names) == 2


def test_what_adds_connects() -> None:
    x = PF.affine(nn.Variable((4, 8)), 8, name="stem")
    inner = F.tanh(x)
    branch = PF.affine(inner, 8, name="branch")
    joined = x + branch
    found = Found(F.mean(joined**2))
    # The residual's trunk carries one scale, into and out of its branch, where no layer leads anywhere.
    assert together(found, x, inner, branch, joined)
    assert all(edge.layer is None for edge in found.components.edges)
    left, right = (PF.affine(F.tanh(x), 8, name=n) for n in ("left", "right"))
    found = Found(F.mean(left * right))
    assert together(found, left, right)
    assert not together(found, left, x)


def test_attention_separates_scores_from_values() -> None:
    x = nn.Variable((2, 4, 8))
    q, k, v = (PF.affine(x, 8, base_axis=2, name=n) for n in "qkv")
    scores = F.batch_matmul(q, k, transpose_b=True)
    weights = F.softmax(scores)
    out = F.batch_matmul(weights, v)
    found = Found(F.mean(out**2))
    assert together(found, scores, weights)
    assert not together(found, out, weights)
    # Either factor of a product of activations gets a scale of its own.
    assert len(set(found.of(out, q, k, v))) == 4
    assert found.layers(out, weights) == ["v/affine/BatchMatmul"]
    assert found.layers(out, v) == ["v/affine/BatchMatmul:1"]
    assert together(Found(F.mean(out**2), by_layer=False), q, k, v, scores, out)


def test_scalars_at_the_loss_separate_and_losses_meet_behind_them() -> None:
    y = PF.affine(nn.Variable((4, 8)), 8, name="a")
    first, second = F.mean(y**2), F.mean(F.sigmoid(y))
    weighted = second * 1e-8
    loss = first + weighted
    found = Found(loss)
    assert len(set(found.of(loss, second, first))) == 3
    assert together(found, first, weighted)
    assert found.name(y) not in found.single
    assert {found.name(v) for v in (loss, second, first)} == found.single
    assert found.layers(first, y) == [None]
    # No layer leads to any of them.
    assert found.components.governed == set(range(4))
    assert found.components.loss_exits == 2


def test_what_is_behind_a_component_is_all_that_backward_computes_from_it() -> None:
    stem = PF.affine(nn.Variable((4, 8)), 8, name="stem")
    left, right = (PF.affine(F.tanh(stem), 8, name=name) for name in ("left", "right"))
    found = Found(F.mean(left**2) + F.mean(right**2))
    assert found.components.behind(found.of(left)[0]) == {*found.of(left, stem)}
    assert found.components.behind(found.of(right)[0]) == {*found.of(right, stem)}
    assert found.components.behind(found.of(stem)[0]) == {*found.of(stem)}
    assert {*found.of(left, right, stem)} < found.components.behind(0)


def test_a_leaf_belongs_to_the_components_of_all_functions_that_write_it() -> None:
    h = [nn.Variable((4, 8))]
    for _ in range(2):
        h.append(F.tanh(PF.affine(h[-1], 8, name="shared")))
    plan = AdaptiveLossScaling(F.mean(h[-1] ** 2)).plan
    found = plan.structure.components(by_layer=True)
    writers = frozenset(found.producers[node.number] for node in plan.structure.nodes if node.leaves)
    assert len(writers) == 2
    assert found.leaves == dict.fromkeys(plan.structure.leaves, writers)


def test_behind_a_layer_nothing_is_governed_whatever_backward_visits_first() -> None:
    deep, shallow = (PF.affine(nn.Variable((4, 8)), 8, name=n) for n in ("deep", "shallow"))
    below = deep
    for _ in range(4):
        below = F.tanh(below)
    clipped = F.clip_grad_by_value(below, F.constant(-1.0, (4, 8)), F.constant(1.0, (4, 8)))
    # The layer leads to what was clipped, too, but backward visits the clipping before it.
    late = F.mean(PF.affine(shallow, 8, name="late") ** 2)
    found = Found(F.mean(F.sigmoid(clipped + shallow)) + late)
    assert together(found, clipped, shallow)
    assert found.components.governed.isdisjoint(found.of(clipped, deep))


def test_an_input_that_wants_its_gradient_has_a_component_of_its_own() -> None:
    x = nn.Variable((4, 8), need_grad=True)
    y = PF.affine(x, 8, name="a")
    found = Found(F.mean(y**2))
    assert found.name(x) == "a/affine:input"
    assert not together(found, x, y)
    assert x not in Found(F.mean(y**2), by_layer=False)


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("clipped", [False, True])
def test_what_no_visited_function_computes_has_a_component(clipped: bool, by_layer: bool) -> None:
    """A gradient penalty sets `need_grad` of data that is computed from other data."""
    mixed = nn.Variable((4, 8)) * 0.5 + nn.Variable((4, 8))
    mixed.need_grad = True
    bounds = F.constant(-1.0, mixed.shape), F.constant(1.0, mixed.shape)
    read = F.clip_grad_by_value(mixed, *bounds) if clipped else mixed
    y = PF.affine(read, 8, name="a")
    y.forward()
    found = Found(F.mean(y**2), by_layer=by_layer)
    assert mixed in found
    assert together(found, mixed, y) == (not clipped and not by_layer)
    assert len(set(found.names)) == len(found.names)


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("network", sorted(NETWORKS))
def test_names_outlive_the_graph(network: str, by_layer: bool) -> None:
    first = Found(NETWORKS[network](), by_layer=by_layer)
    again = Found(NETWORKS[network](), by_layer=by_layer)
    assert again.names == first.names
    assert again.single == first.single
    assert len(set(first.names)) == len(first.names)


@pytest.mark.slow
@pytest.mark.gate
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(networks)
def test_every_gradient_has_one_component_and_every_component_one_name(network: Network) -> None:
    structure = AdaptiveLossScaling(network.loss).plan.structure
    sizes: Dict[bool, int] = {}
    for by_layer in (False, True):
        found = structure.components(by_layer=by_layer)
        assert len(set(found.names)) == len(found.names)
        assert set(found.of.values()) == set(range(len(found.names)))
        assert set(structure.gradients) <= found.of.keys()
        assert [found.of[root] for root in structure.roots] == [0]
        sizes[by_layer] = len(found.names)
        for node in structure.nodes:
            targets: Set[int] = {slot.target for slot in node.slots} if by_layer else set()
            through = {found.of[p] for p in node.inputs if p not in targets}
            if not node.loss_section:
                assert through <= {found.producers[node.number]}
        for edge in found.edges:
            assert edge.before != edge.after
            assert edge.after in found.next[edge.before]
            assert edge.before in found.governed or edge.after not in found.governed
            assert edge.layer is None or edge.after not in found.governed
        # A component is left alone only where nothing leads to it.
        assert {edge.after for edge in found.edges} >= set(range(1, len(found.names)))
        assert 0 in found.governed
    assert sizes[False] <= sizes[True]
