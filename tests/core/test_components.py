# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set

import hypothesis.strategies as st
import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import pytest
from hypothesis import HealthCheck, given, settings

from nnabla_adaloss.core.components import Components, MergedComponents, NodeStructure, merge_components
from nnabla_adaloss.core.schedule import ScaleSchedule, Step
from tests.worlds import random_structures as graphs
from tests.worlds.architectures import NETWORKS
from tests.worlds.random_graphs import Network, networks
from tests.worlds.random_structures import Drawn, structures


class Found(graphs.Graph):
    """The components of a loss."""

    def __init__(self, loss: nn.Variable, *, by_layer: bool = True) -> None:
        super().__init__(loss)
        self.components = self.structure.components(by_layer=by_layer)

    @property
    def names(self) -> List[str]:
        return self.components.names

    @property
    def scalars(self) -> Set[str]:
        return {self.names[index] for index in self.components.scalar_components}

    def of(self, *variables: nn.Variable) -> List[int]:
        return [*map(self.index, variables)]

    def name(self, variable: nn.Variable) -> str:
        return self.names[self.of(variable)[0]]

    def layers(self, before: nn.Variable, after: nn.Variable) -> List[Optional[str]]:
        """The layers that lead from one to the other; None for what is no layer."""
        ends = tuple(self.of(before, after))
        return [e.layer for e in self.components.edges if (e.predecessor, e.successor) == ends]


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
    assert found.components.at_loss == {*found.of(loss, h[4])}
    # The data need no gradient: three layers, two components behind the one at the loss, and the loss's own.
    assert len(found.names) == 4
    assert found.name(loss) in found.scalars
    plain = Found(loss, by_layer=False)
    assert together(plain, *h)
    assert len(plain.names) == 2


def test_additions_connect_components() -> None:
    x = PF.affine(nn.Variable((4, 8)), 8, name="stem")
    inner = F.tanh(x)
    branch = PF.affine(inner, 8, name="branch")
    merged = x + branch
    found = Found(F.mean(merged**2))
    # The residual's trunk carries one scale, into and out of its branch, where no layer leads anywhere.
    assert together(found, x, inner, branch, merged)
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
    assert found.name(y) not in found.scalars
    assert {found.name(v) for v in (loss, second, first)} == found.scalars
    assert found.layers(first, y) == [None]
    # No layer leads to any of them.
    assert found.components.at_loss == set(range(4))


def test_descendants_of_a_component_are_all_that_backward_computes_from_it() -> None:
    stem = PF.affine(nn.Variable((4, 8)), 8, name="stem")
    left, right = (PF.affine(F.tanh(stem), 8, name=name) for name in ("left", "right"))
    found = Found(F.mean(left**2) + F.mean(right**2))
    assert found.components.with_descendants({*found.of(left)}) == {*found.of(left, stem)}
    assert found.components.with_descendants({*found.of(right)}) == {*found.of(right, stem)}
    assert found.components.with_descendants({*found.of(stem)}) == {*found.of(stem)}
    assert {*found.of(left, right, stem)} < found.components.with_descendants({0})


def test_a_leaf_belongs_to_the_components_of_all_functions_that_write_it() -> None:
    h = [nn.Variable((4, 8))]
    for _ in range(2):
        h.append(F.tanh(PF.affine(h[-1], 8, name="shared")))
    n = Found(F.mean(h[-1] ** 2))
    writers = frozenset(n.components.of[node.outputs[0]] for node in n.structure.nodes if node.leaves)
    assert len(writers) == 2
    assert n.components.leaves == dict.fromkeys(n.structure.leaves, writers)


def test_behind_a_layer_no_given_s0_decides_whatever_backward_visits_first() -> None:
    deep, shallow = (PF.affine(nn.Variable((4, 8)), 8, name=n) for n in ("deep", "shallow"))
    below = deep
    for _ in range(4):
        below = F.tanh(below)
    clipped = F.clip_grad_by_value(below, F.constant(-1.0, (4, 8)), F.constant(1.0, (4, 8)))
    # The layer leads to what was clipped, too, but backward visits the clipping before it.
    late = F.mean(PF.affine(shallow, 8, name="late") ** 2)
    found = Found(F.mean(F.sigmoid(clipped + shallow)) + late)
    assert together(found, clipped, shallow)
    assert found.components.at_loss.isdisjoint(found.of(clipped, deep))


def test_an_input_that_wants_its_gradient_has_a_component_of_its_own() -> None:
    x = nn.Variable((4, 8), need_grad=True)
    y = PF.affine(x, 8, name="a")
    found = Found(F.mean(y**2))
    assert found.name(x) == "a/affine:input"
    assert not together(found, x, y)
    plain = Found(F.mean(y**2), by_layer=False)
    assert plain.position(x) not in plain.components.of


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("clipped", [False, True])
def test_gradients_that_no_visited_function_computes_have_a_component(clipped: bool, by_layer: bool) -> None:
    """A gradient penalty sets `need_grad` of data that is computed from other data."""
    mixed = nn.Variable((4, 8)) * 0.5 + nn.Variable((4, 8))
    mixed.need_grad = True
    bounds = F.constant(-1.0, mixed.shape), F.constant(1.0, mixed.shape)
    read = F.clip_grad_by_value(mixed, *bounds) if clipped else mixed
    y = PF.affine(read, 8, name="a")
    y.forward()
    found = Found(F.mean(y**2), by_layer=by_layer)
    assert found.position(mixed) in found.components.of
    assert together(found, mixed, y) == (not clipped and not by_layer)
    assert len(set(found.names)) == len(found.names)


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("network", sorted(NETWORKS))
def test_names_outlive_the_graph(network: str, by_layer: bool) -> None:
    first, again = (Found(NETWORKS[network](), by_layer=by_layer) for _ in range(2))
    assert again.names == first.names
    assert again.scalars == first.scalars
    assert len(set(first.names)) == len(first.names)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(networks)
def test_every_gradient_has_one_component_and_every_component_one_name(network: Network) -> None:
    structure = Found(network.loss).structure
    sizes: Dict[bool, int] = {}
    for by_layer in (False, True):
        found = structure.components(by_layer=by_layer)
        assert len(set(found.names)) == len(found.names)
        assert set(found.of.values()) == set(range(len(found.names)))
        assert set(structure.gradients) <= found.of.keys()
        assert [found.of[root] for root in structure.roots] == [0]
        sizes[by_layer] = len(found.names)
        for node in structure.nodes:
            targets: Set[int] = {slot.input for slot in node.layer_inputs} if by_layer else set()
            through = {found.of[p] for p in node.inputs if p not in targets}
            if not node.loss_section:
                assert through <= {found.of[node.outputs[0]]}
        for edge in found.edges:
            assert edge.predecessor != edge.successor
            assert edge.successor in found.with_descendants({edge.predecessor})
            assert edge.predecessor in found.at_loss or edge.successor not in found.at_loss
            assert edge.layer is None or edge.successor not in found.at_loss
        # A component is left alone only where nothing leads to it.
        assert {edge.successor for edge in found.edges} >= set(range(1, len(found.names)))
        assert 0 in found.at_loss
    assert sizes[False] <= sizes[True]


# Components that only hooks could part are joined.


class Together(Found):
    """The joined components of a loss."""

    def __init__(self, loss: nn.Variable) -> None:
        super().__init__(loss)
        self.apart, self.merged = self.components, self.structure.merged
        self.components = self.merged.components


def dense(x: nn.Variable, name: str, width: int = 8) -> nn.Variable:
    return PF.affine(x, width, base_axis=len(x.shape) - 1, name=name)


def data(*shape: int) -> nn.Variable:
    return nn.Variable(shape or (4, 8))


def heads() -> nn.Variable:
    h = F.tanh(dense(F.tanh(dense(data(), "a")), "b"))
    return F.mean(dense(h, "left") ** 2) + F.mean(F.sigmoid(dense(h, "right"))) * 0.1


def test_products_of_activations_share_a_scale_with_their_operands() -> None:
    stem = F.tanh(dense(data(2, 4, 8), "stem"))
    q, k, v = (dense(stem, name) for name in "qkv")
    scores = F.batch_matmul(q, k, transpose_b=True)
    weights = F.softmax(scores)
    out = F.batch_matmul(weights, v)
    last = dense(F.tanh(out), "last")
    loss = F.mean(last**2)
    found = Together(loss)
    assert together(found, out, weights, scores, q, k, v)
    assert len(set(Found(loss).of(out, weights, q, k, v))) == 5
    # Layers with weights of their own lead there, and on.
    assert len({*found.of(loss, last, out, stem)}) == 4
    assert found.layers(last, out) == ["last/affine"]
    assert set(found.layers(out, stem)) == {"q/affine", "k/affine", "v/affine"}


# Of a frozen one nothing is added to anywhere, but there is one array.
@pytest.mark.parametrize("options", [{}, {"with_bias": False}, {"fix_parameters": True}])
def test_layers_of_one_weight_have_one_alpha(options: Any) -> None:
    inner = [F.tanh(dense(data(), name)) for name in ("left", "right")]
    outer = [PF.affine(h, 8, name="shared", **options) for h in inner]
    loss = F.mean(outer[0] ** 2) + F.mean(F.sigmoid(outer[1]))
    apart, found = Found(loss), Together(loss)
    assert len(set(apart.of(*inner, *outer))) == 4
    assert together(found, *outer)
    assert together(found, *inner)
    assert not together(found, inner[0], outer[0])
    assert found.layers(outer[0], inner[0]) == ["shared/affine", "shared/affine#2"]


@pytest.mark.parametrize("how", ["bias", "added", "multiplied", "summed", "squared"])
def test_contributions_to_a_leaf_that_another_component_writes(how: str) -> None:
    inner = dense(data(), "a")
    outer = dense(F.tanh(inner), "b")
    leaf = nn.get_parameters()["a/affine/b"]
    end = {
        "bias": lambda: F.mean(F.affine(F.tanh(outer), PF.get_parameter_or_create("w", (8, 8)), leaf)),
        "added": lambda: F.mean(F.sigmoid(outer + F.broadcast(F.reshape(leaf, (1, 8)), (4, 8)))),
        "multiplied": lambda: F.mean(F.sigmoid(outer * F.broadcast(F.reshape(leaf, (1, 8)), (4, 8)))),
        # What separates components brings the leaf the scale that it already has.
        "summed": lambda: F.mean(outer) + F.sum(leaf),
        "squared": lambda: F.mean(outer) + F.sum(leaf**2),
    }[how]()
    found, apart = Together(end), Found(end)
    position = found.position(leaf)
    writers = apart.components.leaves[position]
    assert len(writers) == 2
    assert len(found.components.leaves[position]) == (2 if how == "summed" else 1)
    assert together(found, inner, outer) == (how in ("added", "multiplied"))
    assert not together(apart, inner, outer)


def test_a_weight_that_cannot_be_swapped_has_one_scale_on_both_sides() -> None:
    inner = F.tanh(dense(data(), "a"))
    outer = dense(inner, "b")
    penalty = F.sum(nn.get_parameters()["b/affine/W"] ** 2)
    found = Together(F.mean(outer**2) + penalty)
    assert together(found, inner, outer)
    nn.clear_parameters()
    inner = F.tanh(dense(data(), "a"))
    outer = dense(inner, "b")
    found = Together(F.mean(outer**2) + F.sum(nn.get_parameters()["a/affine/W"] ** 2))
    # The first layer's weight multiplies data alone: there is no gradient to be scaled by it.
    assert not together(found, inner, outer)


def test_a_given_s0_decides_about_no_component_that_a_layer_leads_to_by_any_way() -> None:
    first = dense(data(), "shared")
    second = dense(F.tanh(first), "shared")
    loss = F.mean(second**2)
    apart, found = Found(loss), Together(loss)
    assert together(found, first, second)
    assert apart.components.at_loss == {*apart.of(loss, second)}
    assert found.components.at_loss == {*found.of(loss)}
    # With weights of their own both are what they were.
    plain = Together(F.mean(dense(F.tanh(dense(data(), "a")), "b") ** 2))
    assert plain.components.at_loss == plain.apart.at_loss


@pytest.mark.parametrize("network", sorted(NETWORKS))
def test_joined_components_of_networks_that_people_build(network: str) -> None:
    found = Together(NETWORKS[network]())
    assert_coarser(found.apart, found.merged)


@pytest.mark.parametrize("network", [NETWORKS["u_net"], NETWORKS["squeeze_and_excite"], heads])
def test_components_that_need_no_hooks_stay_split(network: Callable[[], nn.Variable]) -> None:
    found = Together(network())
    assert list(found.merged.of) == list(range(len(found.apart.names)))
    assert found.merged.components == found.apart
    assert len(found.apart.names) > 2


def assert_coarser(apart: Components, found: MergedComponents) -> None:
    graph, of = found
    assert {graph.of[position] for position in apart.of} == set(range(len(graph.names)))
    assert all(graph.of[position] == of[own] for position, own in apart.of.items())
    assert of[apart.root] == graph.root
    assert {name for name in graph.names if name not in apart.names} == set()
    for leaf, writers in apart.leaves.items():
        assert graph.leaves[leaf] == {of[own] for own in writers}
    for index in range(len(graph.names)):
        own = {number for number, to in enumerate(of) if to == index}
        assert (index in graph.at_loss) == (own <= apart.at_loss)


# What holds whatever is joined, for graphs that never run.


class Case(NamedTuple):
    """A graph whose functions share weights, and of these the ones that can be swapped."""

    drawn: Drawn
    swappable: Set[int]
    apart: Components
    merged: MergedComponents
    steps: Dict[int, Step]


def sharing(node: NodeStructure, to: Dict[int, int]) -> NodeStructure:
    """A function with some of its leaves replaced; one that is both factors of a product gets no scale."""
    layer_inputs = [
        slot._replace(input=to.get(slot.input, slot.input), weight=to.get(slot.weight, slot.weight))
        for slot in node.layer_inputs
    ]
    leaves = tuple(dict.fromkeys(to.get(leaf, leaf) for leaf in node.leaves))
    scaled = tuple(slot for slot in layer_inputs if slot.input != slot.weight)
    return node._replace(leaves=leaves, layer_inputs=scaled)


@st.composite
def cases(draw: Any) -> Case:
    drawn = draw(structures())
    leaves = sorted({leaf for node in drawn.nodes for leaf in node.leaves})
    to = {leaf: draw(st.sampled_from([leaf, *leaves])) for leaf in leaves}
    nodes = [sharing(node, to) for node in drawn.nodes]
    factors = sorted({slot.weight for node in nodes for slot in node.layer_inputs})
    swappable = set(factors) - (draw(st.sets(st.sampled_from(factors))) if factors else set())
    shared = drawn._replace(nodes=nodes)
    apart = shared.components()
    found = merge_components(apart, nodes, drawn.sizes, swappable)
    count = len(found.components.names)
    exponents = draw(st.lists(st.integers(-20, 20), min_size=count, max_size=count))
    scales = [2.0 ** exponents[index] for index in found.of]
    schedule = ScaleSchedule(
        shared.structure.nodes, apart, scales, None, (1.0,) * len(scales), is_merged=True
    )
    return Case(shared, swappable, apart, found, dict(schedule.steps))


@given(cases())
def test_merged_components_of_any_graph(case: Case) -> None:
    assert_coarser(case.apart, case.merged)
    # No choice of scales swaps an unswappable weight, and a weight has one alpha.
    alphas: Dict[int, Set[float]] = {}
    for node in case.drawn.nodes:
        if node.layer_inputs:
            found = zip(node.layer_inputs, case.steps[node.number].alphas)
            assert all(alpha == 1.0 for slot, alpha in found if slot.weight not in case.swappable)
            if not node.separates:
                for slot, alpha in zip(node.layer_inputs, case.steps[node.number].alphas):
                    alphas.setdefault(slot.weight, set()).add(alpha)
    assert all(len(own) == 1 for own in alphas.values())
    # Contributions to a leaf have one scale.
    scales: Dict[int, Set[float]] = {}
    for node in case.drawn.nodes:
        for leaf in () if node.separates else node.leaves:
            step = case.steps[node.number]
            own = {one.input: step.scale * alpha for one, alpha in zip(node.layer_inputs, step.alphas)}
            scales.setdefault(leaf, set()).add(own.get(leaf, step.scale))
    assert all(len(found) == 1 for found in scales.values())


@given(structures())
def test_nothing_is_joined_where_no_function_shares_a_leaf_and_all_can_be_swapped(drawn: Drawn) -> None:
    swappable = {slot.weight for node in drawn.nodes for slot in node.layer_inputs}
    apart = drawn.components()
    found = merge_components(apart, drawn.nodes, drawn.sizes, swappable)
    # A weight that one function multiplies two gradients by gives both one alpha.
    if all(len(node.layer_inputs) < 2 for node in drawn.nodes):
        assert found == (apart, range(len(apart.names)))
