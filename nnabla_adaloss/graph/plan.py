# SPDX-License-Identifier: Apache-2.0
"""Roles of a graph's functions in backward, common to all graphs of one topology."""

from __future__ import annotations

import math
from collections import Counter
from copy import copy
from functools import cached_property
from types import MappingProxyType
from typing import Any, Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple, Union

import nnabla as nn

from ..core.components import (
    Components,
    LayerInput,
    MergedComponents,
    NodeStructure,
    components_of,
    merge_components,
)
from ..core.layer_selection import LayerSelection
from .description import GraphDescription, backward_order
from .functions import UNSCALED, properties_of
from .graph import Graph
from .loss_weights import LossWeights
from .memory_uses import MemoryUses, host_functions, memory_uses, numbers_on_host, state_leaves
from .names import ParameterNames, function_names


class PlanOptions(NamedTuple):
    """Options of a plan besides the graph."""

    selection: LayerSelection
    adaptive: bool  # False: no function between the loss and the first layer may be rescaled
    non_homogeneous: FrozenSet[str]  # further types with a gradient not linear in the output's


class GraphPlan:
    """Roles of a graph's functions in backward, shared by all graphs of one topology; `print` it.

    Functions are given by number, variables by position in the `Graph`.

    Args:
        loss: the variable that backward starts from, or its graph.
        selection: the layers that get a scale.
        adaptive: False when no function between the loss and the first layer may be rescaled.
        non_homogeneous: type names of further functions whose gradient is not linear in the output gradient.
        names: names of parameters, by variable key; those in nnabla's current scope are added.
        one_gradient: for leaves that share a gradient array, the first one of them.

    Attributes:
        described: the graph by value.
        labels: the name of each function.
        names: the names of the parameters in the graph, by variable key.
        nodes: the functions that backward visits, in its order.
        gradients: the variables that get a gradient, except leaves.
        leaves: the leaves that get a gradient.
        layers: names of the layers that get a scale, in backward order.
        stopped: type names of the functions that backward does not visit.
        roots: the outputs that backward starts from.
        scalars: the variables of one element.

    Raises:
        ValueError: a pattern of the selection matches no layer.
    """

    def __init__(
        self,
        loss: Union[nn.Variable, Graph],
        selection: LayerSelection = LayerSelection(),  # noqa: B008  # immutable
        *,
        adaptive: bool = True,
        non_homogeneous: Sequence[str] = (),
        names: Optional[ParameterNames] = None,
        one_gradient: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        graph = loss if isinstance(loss, Graph) else Graph(loss)
        described = graph.description(graph.completed_names(names), one_gradient)
        self.described, self.options = described, PlanOptions(selection, adaptive, frozenset(non_homogeneous))
        self._hold(graph)
        self._on_host = numbers_on_host(described, graph.functions)
        self._components: Dict[bool, Components] = {}
        self._weights: Dict[bool, LossWeights] = {}
        self._size_classes = _size_classes(described)
        self.scalars = frozenset(p for p, size in enumerate(self._size_classes) if size == 1)
        self._inputs = described.inputs.by_function()
        self._producers = described.inputs.by_function(described.producers)
        self._needs = described.inputs.by_function(described.needs)
        self._outputs = described.outputs.by_function()
        # Row of each function in the table.
        self._rows = list(map(properties_of, described.type_names))
        self.labels = function_names(described)
        self.order = backward_order(described)
        self._half = frozenset(described.in_half)
        scalable = {index: self._layer_inputs(index) for index in self.order}
        selection.check([one.layer for layer_inputs in scalable.values() for one in layer_inputs])
        self._section = self._loss_section()
        section = self._section if adaptive else set()
        self.nodes = [self._node(index, scalable[index], section) for index in self.order]
        self.gradients = list(dict.fromkeys(p for node in self.nodes for p in (*node.outputs, *node.inputs)))
        self.leaves = list(dict.fromkeys(map(self.leaf, (p for node in self.nodes for p in node.leaves))))
        self.stopped = [name for name, need in zip(described.type_names, described.need_grads) if not need]
        self.roots = self._outputs[-1]
        # Sink keeps the gradients of its inputs even when buffers are cleared.
        keeping = (node for node in self.nodes if self._rows[node.number].keeps_gradients)
        self.kept_gradients = {p for node in keeping for p in node.inputs}
        self.swappable = self._swappable(graph.functions)

    def _hold(self, graph: Graph) -> None:
        """Hold parameters and other leaves, so that no other variables get their keys, as freed ones' do."""
        kept = self.described.kept
        self._held = [graph.leaves[position] for position in kept]
        self.kept_keys = {key for key, _ in kept.values()}
        self.names = {key: name for key, name in kept.values() if name is not None}

    def leaf(self, position: int) -> int:
        """Return the leaf, or the first of those that share its gradient array."""
        return self.described.shared_gradients.get(position, position)

    def of_alike(
        self, graph: Graph, described: GraphDescription, options: PlanOptions
    ) -> Optional[GraphPlan]:
        """Plan of a graph that differs only in shapes, arguments that depend on them, and data, or None."""
        # Parameters first, in which most other graphs differ.
        kept, before = described.kept, self.described.kept
        if options != self.options or _nameless(described) != _nameless(self.described):
            return None
        # Data with a gradient, which have no names, are new leaves in each graph; weights are not.
        new_leaves = {position for position, leaf in kept.items() if before[position] != leaf}
        if any(kept[position][1] is not None for position in new_leaves):
            return None
        if new_leaves and any(one.weight in new_leaves for node in self.nodes for one in node.layer_inputs):
            return None
        if described == self.described:
            return self
        # Cached roles of a leaf depend on its shape.
        if any(self.described.shapes[p] != described.shapes[p] for p in kept):
            return None
        return self._adapted_to(graph, described)

    def with_other_parameters(
        self, graph: Graph, described: GraphDescription, options: PlanOptions
    ) -> Optional[GraphPlan]:
        """Plan of a graph with the same topology but other parameters, or None."""
        if options != self.options or _nameless(described) != _nameless(self.described):
            return None
        # Patterns would have to select layers again, by their other names.
        return self._adapted_to(graph, described) if options.selection == LayerSelection() else None

    def _adapted_to(self, graph: Graph, described: GraphDescription) -> Optional[GraphPlan]:
        """Copy for a graph that differs only in shapes, arguments, and keys and names of leaves, or None."""
        before = self.described
        same = before._replace(args=described.args, shapes=described.shapes, kept=described.kept) == described
        # Components depend on which variables are scalars.
        if not same or self._size_classes != _size_classes(described):
            return None
        other = copy(self)
        other.described = described
        if described.kept != before.kept:
            other._hold(graph)
            other.labels = function_names(described)
        other.nodes = list(map(other._adapted_node, self.nodes))
        other._weights = {key: one.of_alike(other.nodes, described) for key, one in self._weights.items()}
        # Cached properties are computed again, except for components, which depend on names at most.
        outdated = {name for name, one in vars(GraphPlan).items() if isinstance(one, cached_property)}
        if other.labels == self.labels:
            outdated.remove("merged")
        else:
            other._components = {}
        for name in outdated:
            vars(other).pop(name, None)
        return other

    def _adapted_node(self, node: NodeStructure) -> NodeStructure:
        """Structure of another plan's function with this plan's arguments, shapes and names."""
        args, label = self.described.args[node.number], self.labels[node.number]
        if not node.layer_inputs:
            return node if (args, label) == (node.args, node.label) else node._replace(args=args, label=label)
        # Fan-ins depend on shapes. The layers stay those that the other plan's selection has chosen.
        selected = {one.input for one in node.layer_inputs}
        layer_inputs = tuple([one for one in self._layer_inputs(node.number) if one.input in selected])
        return node._replace(args=args, label=label, layer_inputs=layer_inputs)

    def components(self, *, by_layer: bool) -> Components:
        """Components: gradients connected by functions that pass a scale on; see `components_of`."""
        if by_layer not in self._components:
            shared = self.described.shared_gradients
            components = components_of(self.nodes, self._size_classes, shared, by_layer=by_layer)
            self._components[by_layer] = components
        return self._components[by_layer]

    @cached_property
    def merged(self) -> MergedComponents:
        """Components, merged where only hooks could split them."""
        components, shared = self.components(by_layer=True), self.described.shared_gradients
        return merge_components(components, self.nodes, self._size_classes, self.swappable, shared)

    def loss_weights(self, *, by_layer: bool) -> LossWeights:
        """Reader of the loss weights of the components with the same `by_layer`."""
        if by_layer not in self._weights:
            nodes, described, components = self.nodes, self.described, self.components(by_layer=by_layer)
            self._weights[by_layer] = LossWeights(nodes, self._section, described, components, self.scalars)
        return self._weights[by_layer]

    @cached_property
    def by_number(self) -> Dict[int, NodeStructure]:
        """Functions that backward visits, by number."""
        return {node.number: node for node in self.nodes}

    @property
    def measured(self) -> List[int]:
        """Variables with a gradient that are not leaves, and the weights of layers."""
        weights = (one.weight for node in self.nodes for one in node.layer_inputs)
        return list(dict.fromkeys([*self.gradients, *weights]))

    @cached_property
    def layer_inputs(self) -> Dict[str, Tuple[NodeStructure, LayerInput]]:
        """Function and input of each layer that gets a scale, by name, in backward order."""
        return {one.layer: (node, one) for node in self.nodes for one in node.layer_inputs}

    @property
    def layers(self) -> List[str]:
        return list(self.layer_inputs)

    @cached_property
    def readers(self) -> Dict[int, Set[int]]:
        """Indices of the visited functions that read a variable, by position."""
        readers: Dict[int, Set[int]] = {}
        for index in self.order:
            for position in self._inputs[index]:
                readers.setdefault(position, set()).add(index)
        return readers

    @cached_property
    def limiting_gradients(self) -> Set[int]:
        """Gradients that must fit the storage format: all except the loss's and those read in float."""
        return {p for p in self.gradients if p in self.scalars or p not in self.in_float} - {*self.roots}

    @cached_property
    def in_float(self) -> Set[int]:
        """Outputs of functions in float in a network in half precision."""
        in_half = any(node.half for node in self.nodes)
        return {p for node in self.nodes if in_half and not node.half for p in node.outputs}

    @cached_property
    def largest_gradients(self) -> List[int]:
        """Elements of `limiting_gradients` that can be the largest of their component."""
        shapes, smaller = self.described.shapes, set()
        for node in self.nodes:
            if self._rows[node.number].never_enlarges and not node.separates:
                read, size = self._inputs[node.number], math.prod(shapes[node.outputs[0]])
                # Only this function reads them: their gradient comes from one that is at least as large.
                smaller |= {
                    p
                    for p in node.inputs
                    if len(self.readers[p]) == read.count(p) == 1 and math.prod(shapes[p]) == size
                }
        return [p for p in self.gradients if p in self.limiting_gradients and p not in smaller]

    @property
    def on_host(self) -> str:
        """Functions that run on the host in a GPU's context, for lack of a CUDA implementation."""
        moved = host_functions(self.described, self._on_host)
        return ", ".join(f"{self.labels[n]} ({size / 1e6:.3g} MB per iteration)" for n, size in moved.items())

    @cached_property
    def memory_uses(self) -> MemoryUses:
        """Times at which leaves are read and outputs written."""
        return memory_uses(self.described)

    def _layer_inputs(self, index: int) -> List[LayerInput]:
        """Inputs that can get a scale, before the selection."""
        product, described, result = self._rows[index].product, self.described, []
        if product is None:
            return []
        inputs, label, needs = self._inputs[index], self.labels[index], self._needs[index]
        shapes, output = [described.shapes[p] for p in inputs], described.shapes[self._outputs[index][0]]
        # Leaves that share a gradient array are one.
        leaves = list(map(self.leaf, inputs))
        for scaled in product.scaled_inputs(described.args[index], shapes, output):
            own, weight = inputs[scaled.input], inputs[scaled.weight]
            # A variable that is both, as in x times x, would be scaled as one and swapped as the other.
            if needs[scaled.input] and leaves.count(self.leaf(own)) == inputs.count(weight) == 1:
                name = label if scaled.input == 0 else f"{label}:{scaled.input}"
                to_leaf, half = self._producers[index][scaled.input] is None, index in self._half
                result.append(LayerInput(name, scaled, own, weight, to_leaf=to_leaf, half=half))
        return result

    def _swappable(self, functions: Sequence[Any]) -> FrozenSet[int]:
        """Positions of the weights that a pass can swap for scaled copies: only their layers read them."""
        producers = {p: index for index, outputs in enumerate(self._outputs) for p in outputs}
        layers: Dict[int, Set[int]] = {}  # functions of the layers that read each weight
        candidates: Set[int] = set()
        for node in self.nodes:
            of_activations = self._rows[node.number].of_activations
            for layer_input in node.layer_inputs:
                layers.setdefault(layer_input.weight, set()).add(node.number)
                if not (of_activations and layer_input.weight in producers):
                    candidates.add(layer_input.weight)
        reads, visited = self.described.reads, {*self.order}

        def is_read_otherwise(weight: int) -> bool:
            # By backward of other functions: as an input, or as an output.
            others = (self.readers[weight] | ({producers.get(weight, -1)} & visited)) - layers[weight]
            return any(self._rows[i].reads_more or reads(functions[i], i, weight) for i in others)

        return frozenset(weight for weight in candidates if not is_read_otherwise(weight))

    def _loss_section(self) -> Set[int]:
        """Functions between loss and first layers; without layers, the scalar ones."""
        section: Set[int] = set()
        after_layers: Set[int] = set()  # positions that backward reaches through a layer
        for index in self.order:
            outputs = self._outputs[index]
            if self._rows[index].product is not None or not after_layers.isdisjoint(outputs):
                after_layers.update(self._inputs[index])
            elif len(outputs) == 1:
                section.add(index)
        return section if after_layers else {i for i in section if self._outputs[i][0] in self.scalars}

    def _node(self, index: int, layer_inputs: Sequence[LayerInput], section: Set[int]) -> NodeStructure:
        """Structure of a function, with those of its possible `layer_inputs` that are selected."""
        described, label, row = self.described, self.labels[index], self._rows[index]
        type_name, outputs = described.type_names[index], self._outputs[index]
        needed: Dict[int, Optional[int]] = {}  # inputs with a gradient, each once, and their producers
        for position, producer, need in zip(self._inputs[index], self._producers[index], self._needs[index]):
            if need and position not in needed:
                needed[position] = producer
        linear = row.linear and type_name not in self.options.non_homogeneous
        in_section, selects = index in section, self.options.selection.selects
        return NodeStructure(
            number=index,
            type_name=type_name,
            args=described.args[index],
            label=label,
            outputs=tuple(outputs),
            inputs=tuple([p for p, producer in needed.items() if producer is not None]),
            leaves=tuple([p for p, producer in needed.items() if producer is None]),
            layer_inputs=tuple([s for s in layer_inputs if selects(label, s.layer)]),
            loss_section=in_section,
            linear=linear,
            own_references=row.own_references,
            half=index in self._half,
            separates=not linear or (in_section and len(outputs) == 1 and outputs[0] in self.scalars),
        )

    @cached_property
    def state_leaves(self) -> Dict[int, Optional[int]]:
        """Leaves that may hold state: the function that writes each in forward, or None."""
        return state_leaves(self.described)

    def __str__(self) -> str:
        rows: List[Tuple[str, ...]] = [("function", "role", "layer", "K", "W shape")]
        readers = Counter(position for node in self.nodes for position in node.inputs)
        for node in self.nodes:
            role = "scaled" if node.layer_inputs else "passed through"
            if node.loss_section:
                role += " (loss)"
            elif self._rows[node.number].product is UNSCALED:
                role += " (no scale of its own)"
            if any(readers[p] > 1 for p in node.outputs):
                role += ", fan-out"
            layer = node.label if node.layer_inputs or node.leaves else ""
            fan_in = ", ".join(f"{one.scaled.fan_in:g}" for one in node.layer_inputs)
            shapes = ["x".join(map(str, self.described.shapes[one.weight])) for one in node.layer_inputs]
            rows.append((node.type_name, role, layer, fan_in, ", ".join(shapes)))
        rows += [(name, "stop", "", "", "") for name in self.stopped]
        widths = [max(map(len, column)) for column in zip(*rows)]
        rows.insert(1, tuple("-" * width for width in widths))
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        if self.on_host:
            lines += ["", f"on the host, for lack of a CUDA implementation: {self.on_host}"]
        return "\n".join(lines)


def _nameless(described: GraphDescription) -> Dict[int, bool]:
    """True for kept leaves without a name, by position."""
    return {position: name is None for position, (_, name) in described.kept.items()}


def _size_classes(described: GraphDescription) -> List[int]:
    """Size of each variable, where 2 means two or more elements."""
    size = {shape: min(math.prod(shape), 2) for shape in {*described.shapes}}
    return list(map(size.__getitem__, described.shapes))
