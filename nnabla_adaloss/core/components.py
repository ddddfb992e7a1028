# SPDX-License-Identifier: Apache-2.0
"""Components: gradients with a common scale, connected by functions that only pass a scale on."""

from __future__ import annotations

from collections import defaultdict
from typing import AbstractSet, Any, Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Sequence, Tuple


class ScaledInput(NamedTuple):
    """Input of a matrix product whose gradient can be scaled, by index."""

    input: int
    weight: int  # input that multiplies the output gradient: the weight
    fan_in: float  # K, the mean number of products summed into one element of the input gradient
    fan_in_bound: float  # largest such number of any element, for overflow bounds


class LayerInput(NamedTuple):
    """Layer: an input of a function whose gradient is scaled; variables are given by position."""

    layer: str
    scaled: ScaledInput  # the same by index of the inputs, with the fan-in
    input: int  # the input whose gradient is scaled
    weight: int  # the weight
    to_leaf: bool  # True if the input is a leaf, whose gradient is kept unscaled in an array of its own
    half: bool  # True if the function reads the weight in half precision


class NodeStructure(NamedTuple):
    """Properties of a function that matter for scales; variables are given by position."""

    number: int  # in forward order
    type_name: str
    args: Mapping[str, Any]
    label: str
    outputs: Tuple[int, ...]
    inputs: Tuple[int, ...]  # inputs with a gradient that are not leaves, each once
    leaves: Tuple[int, ...]  # leaves with a gradient among the inputs
    layer_inputs: Tuple[LayerInput, ...]
    loss_section: bool  # True between the loss and the first layer
    linear: bool  # True if its input gradients are proportional to the output gradient
    own_references: bool  # True if it keeps references to its parameters' arrays: no others can replace them
    half: bool
    # True if it separates the component of its inputs from that of its output, although no layer scales
    # there: it is not linear, and must read an unscaled gradient; or its output is a scalar at the loss.
    separates: bool


class Edge(NamedTuple):
    """Function that leads from one component to another."""

    predecessor: int  # nearer to the loss
    successor: int  # reached later by backward
    layer: Optional[str]  # None if it is not a layer
    weight: int  # position of the layer's weight; -1 without one


class Components(NamedTuple):
    """Components of a graph's gradients, with variables by position and functions by number."""

    of: Dict[int, int]  # of each variable with a gradient, except leaves that no layer scales
    names: List[str]  # of the function whose output gradient is the component's first in backward order
    scalar_components: FrozenSet[int]  # components of scalars only
    leaves: Mapping[int, FrozenSet[int]]  # components of all contributions to the gradient of each leaf
    edges: Sequence[Edge]  # in backward order
    at_loss: FrozenSet[int]  # components that no layer leads to: a given S0 limits their scales

    @property
    def root(self) -> int:
        """Component of the loss gradient: the first in backward order."""
        return 0

    def with_descendants(self, indices: AbstractSet[int]) -> AbstractSet[int]:
        """Components with these indices, and all that edges lead to from them."""
        reached, count = {*indices}, 0
        # One round is enough, unless a skip connection makes a cycle: a layer leads to an earlier component.
        while count < len(reached):
            count = len(reached)
            for edge in self.edges:
                if edge.predecessor in reached:
                    reached.add(edge.successor)
        return reached

    @property
    def computed(self) -> Sequence[int]:
        """Components whose gradient backward computes: all, except that of a scalar loss, which is given."""
        return range(1 if self.root in self.scalar_components else 0, len(self.names))


class MergedComponents(NamedTuple):
    """Components merged where only hooks, callbacks around each function of backward, could split them."""

    components: Components
    of: Sequence[int]  # merged component of each component, by index


def components_of(
    nodes: Sequence[NodeStructure],
    sizes: Sequence[int],
    shared_gradients: Mapping[int, int] = {},
    *,
    by_layer: bool,
) -> Components:
    """Find the components of a graph's gradients. `sizes`, by position: 1 for scalars; `shared_gradients`: by
    leaf, the first one that has the same gradient array; `by_layer`: False if every alpha is 1, so that
    layers pass their scale on as other functions do.
    """
    groups: List[Sequence[int]] = []  # of positions with a common scale
    for node in nodes:
        scaled = {one.input for one in node.layer_inputs} if by_layer else set()
        passed_on = [position for position in node.inputs if position not in scaled]
        if node.separates:
            # Its inputs share one scale: rescaling a scalar output to it spares rescaling each of them.
            groups += [node.outputs, passed_on]
        else:
            groups.append([*node.outputs, *passed_on])
        # A scaled input belongs to a component also if it is a leaf; other leaves belong to none.
        groups += [[position] for position in scaled]
    return _number_components(nodes, sizes, shared_gradients, _unite(groups))


def merge_components(
    components: Components,
    nodes: Sequence[NodeStructure],
    sizes: Sequence[int],
    swappable: AbstractSet[int],
    shared_gradients: Mapping[int, int] = {},
) -> MergedComponents:
    """Merge components that only hooks could split; only `swappable` weights can be replaced for a pass."""
    # Groups of components with one scale. A label, such as ("leaf", 3), unites all groups that contain it.
    groups: List[Sequence[Any]] = [[index] for index in range(len(components.names))]
    for node in nodes:
        output = components.of[node.outputs[0]]
        for one in node.layer_inputs:
            scaled = components.of[one.input]
            # All layers that read a weight use one copy of it, and so one alpha = S(input) / S(output).
            groups += [[output, ("output of", one.weight)], [scaled, ("input of", one.weight)]]
            if one.weight not in swappable:
                groups.append([output, scaled])  # without a scaled copy alpha is 1
        # Without hooks, contributions to a leaf are summed, at one scale, and then unscaled. Only functions
        # that separate components are so few that hooks around them may unscale their contributions.
        for leaf in () if node.separates else node.leaves:
            contribution = component_of_contribution(node, leaf, components.of)
            groups.append([contribution, ("leaf", shared_gradients.get(leaf, leaf))])
    union_of = _unite(groups)
    unions = [union_of[index] for index in range(len(components.names))]
    if len({*unions}) == len(unions):
        return MergedComponents(components, range(len(unions)))
    union_of_position = {position: unions[index] for position, index in components.of.items()}
    merged = _number_components(nodes, sizes, shared_gradients, union_of_position)
    merged_of = {index: merged.of[position] for position, index in components.of.items()}
    of = [merged_of[index] for index in range(len(unions))]
    # A given S0 limits merged components only if no layer leads to any of their parts.
    after_layers = {number for index, number in enumerate(of) if index not in components.at_loss}
    return MergedComponents(merged._replace(at_loss=frozenset(of) - after_layers), of)


def _number_components(
    nodes: Sequence[NodeStructure],
    sizes: Sequence[int],
    shared_gradients: Mapping[int, int],
    union_of: Mapping[int, object],
) -> Components:
    """Make a component of the positions with equal `union_of`, in backward order, with edges between them."""
    named = [(node.outputs[0], node.label) for node in nodes]
    # Components without an output here: scaled leaves, and inputs whose own function backward does not visit.
    for node in nodes:
        named += [(one.input, f"{one.layer}:input") for one in node.layer_inputs if one.input in union_of]
        named += [(position, f"{node.label}:input") for position in node.inputs]
    names: Dict[object, str] = {}  # by union
    for position, name in named:
        names.setdefault(union_of[position], name)
    numbers = {union: number for number, union in enumerate(names)}
    of = {position: numbers[union] for position, union in union_of.items()}
    leaves: Dict[int, List[int]] = defaultdict(list)
    edges: List[Edge] = []
    for node in nodes:
        for leaf in node.leaves:
            leaves[shared_gradients.get(leaf, leaf)].append(component_of_contribution(node, leaf, of))
        if node.layer_inputs or node.separates:
            # With `by_layer=False` a scaled leaf is in no component, and no edge leads to it.
            layers = {one.input: (one.layer, one.weight) for one in node.layer_inputs if one.input in of}
            inputs = {position: layers.get(position, (None, -1)) for position in [*layers, *node.inputs]}
            of_node = [Edge(of[node.outputs[0]], of[p], *layer) for p, layer in inputs.items()]
            edges += [edge for edge in dict.fromkeys(of_node) if edge.predecessor != edge.successor]
    indices = frozenset(range(len(names)))
    components = Components(
        of=of,
        names=[*names.values()],
        scalar_components=indices - {index for position, index in of.items() if sizes[position] != 1},
        leaves={leaf: frozenset(contributions) for leaf, contributions in leaves.items()},
        edges=edges,
        at_loss=frozenset(),
    )
    after_layers = {edge.successor for edge in edges if edge.layer is not None}
    return components._replace(at_loss=indices - components.with_descendants(after_layers))


def component_of_contribution(node: NodeStructure, leaf: int, component_of: Mapping[int, int]) -> int:
    """Component of the gradient that a function contributes to a leaf."""
    # A leaf has a component if a layer scales it. Other functions contribute at the scale of their output.
    scaled = leaf in component_of and any(one.input == leaf for one in node.layer_inputs)
    return component_of[leaf if scaled else node.outputs[0]]


def _unite(groups: Sequence[Sequence[Any]]) -> Dict[Any, Any]:
    """Unite groups that have a member in common; return for each member one that represents its union."""
    parents: Dict[Any, Any] = {}  # union-find tree

    def root(key: Any) -> Any:
        while parents[key] != key:
            parents[key] = parents[parents[key]]  # shortens the path for later searches
            key = parents[key]
        return key

    for group in groups:
        for key in group:
            parents.setdefault(key, key)
        roots = [root(key) for key in group]
        for one in roots:
            parents[one] = roots[0]
    return {key: root(key) for key in parents}
