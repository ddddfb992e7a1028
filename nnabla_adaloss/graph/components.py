# SPDX-License-Identifier: Apache-2.0
"""Which gradients carry one scale because functions that only pass a scale on connect them."""

from __future__ import annotations

from typing import AbstractSet, Dict, FrozenSet, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set

from .node import NodeStructure


class Edge(NamedTuple):
    """A way from one component to another, whatever the shapes: a layer, or what may change the scale."""

    before: int
    after: int
    layer: Optional[str]  # None: no layer
    factor: int  # position of the layer's weight; -1 without one
    expands: bool  # whether the function's input has several elements


class Components(NamedTuple):
    """The connected components of a graph's gradients. Variables go by position, functions by number."""

    of: Dict[int, int]  # of each variable that gets a gradient, but for leaves that no layer scales
    names: List[str]  # of the function whose output gradient is the first of the component in backward order
    producers: Dict[int, int]  # of each function's output gradient
    single: FrozenSet[str]  # those in which every gradient has one element
    next: Sequence[AbstractSet[int]]  # of each, those that its gradients are turned into
    leaves: Mapping[int, int]  # of the first function that writes the gradient of each leaf
    edges: Sequence[Edge]  # in backward order
    governed: FrozenSet[int]  # those that no layer leads to: a given S0 decides their scales
    loss_exits: int  # in how many places the gradient leaves the section between loss and first layers

    @property
    def root(self) -> int:
        """That of the loss gradient: the first in backward order."""
        return 0

    def behind(self, first: int) -> Set[int]:
        """A component, and all that backward computes from its gradients."""
        return _reachable(self.next, {first})

    @property
    def measured(self) -> List[int]:
        """All but that of a loss of one element, whose gradient is what backward is given."""
        root = self.root if self.names[self.root] in self.single else -1
        return [index for index in range(len(self.names)) if index != root]


def components_of(nodes: Sequence[NodeStructure], sizes: Sequence[int], *, by_layer: bool) -> Components:
    """The components of the gradients of a graph.

    Functions of one element at the loss (a loss weight, a mean before it spreads) can take any scale, so they
    separate components, as functions do whose gradient is not linear in the output gradient; and layers do
    with `by_layer`. Of `sizes`, by position, 2 stands for several elements.
    """
    parents: Dict[int, int] = {}
    for node in nodes:
        _connect(parents, node.outputs)
        targets = {slot.target for slot in node.slots} if by_layer else set()
        passed_on = [position for position in node.inputs if position not in targets]
        _connect(parents, passed_on if node.separates else [*node.outputs[:1], *passed_on])
        # The gradients of leaves, too, which are kept in arrays of their own.
        for position in targets.intersection([*node.inputs, *(s.target for s in node.slots if s.to_leaf)]):
            parents.setdefault(position, position)
    return _numbered(nodes, sizes, parents)


def _numbered(nodes: Sequence[NodeStructure], sizes: Sequence[int], parents: Dict[int, int]) -> Components:
    of: Dict[int, int] = {}
    names: List[str] = []
    numbers: Dict[int, int] = {}

    def number(position: int, name: str) -> int:
        root = _root(parents, position)
        if root not in numbers:
            numbers[root] = len(names)
            names.append(name)
        return numbers[root]

    producers: Dict[int, int] = {}
    for node in nodes:
        for position in node.outputs:
            of[position] = number(position, node.label)
        producers[node.number] = of[node.outputs[0]]
    for node in nodes:
        for slot in node.slots:
            if slot.target not in of and slot.target in parents:
                of[slot.target] = number(slot.target, f"{slot.layer}:input")
        # Computed by a function that backward does not visit, and wanted all the same, as nn.grad does.
        for position in node.inputs:
            if position not in of:
                of[position] = number(position, f"{node.label}:input")
    several = {component for position, component in of.items() if sizes[position] != 1}
    single = frozenset(name for index, name in enumerate(names) if index not in several)
    edges = [edge for node in nodes for edge in _edges(node, of, producers[node.number])]
    following: List[Set[int]] = [set() for _ in names]
    for edge in edges:
        following[edge.before].add(edge.after)
    behind_layers = _reachable(following, {edge.after for edge in edges if edge.layer is not None})
    leaves = {leaf: producers[node.number] for node in reversed(nodes) for leaf in node.leaves}
    return Components(
        of=of,
        names=names,
        producers=producers,
        single=single,
        next=following,
        leaves=leaves,
        edges=edges,
        governed=frozenset(range(len(names))) - behind_layers,
        loss_exits=sum(node.loss_exit for node in nodes),
    )


def _edges(node: NodeStructure, of: Mapping[int, int], before: int) -> Iterable[Edge]:
    """The ways through a function, to components other than that of its output."""
    scaled = {slot.target for slot in node.slots if of.get(slot.target, before) != before}
    for slot in node.slots:
        if slot.target in scaled:
            yield Edge(before, of[slot.target], slot.layer, slot.factor, node.expands)
    for after in dict.fromkeys(of[p] for p in node.inputs if p not in scaled):
        if after != before:
            yield Edge(before, after, None, -1, node.expands)


def _reachable(following: Sequence[AbstractSet[int]], first: AbstractSet[int]) -> Set[int]:
    """Some components, and all that lie behind them."""
    found, waiting = {*first}, [*first]
    while waiting:
        new = following[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def _root(parents: Dict[int, int], key: int) -> int:
    """The position that stands for all that are connected with `key`."""
    while parents[key] != key:
        parents[key] = key = parents[parents[key]]
    return key


def _connect(parents: Dict[int, int], keys: Iterable[int]) -> None:
    first = None
    for key in keys:
        parents.setdefault(key, key)
        if first is not None:
            parents[_root(parents, key)] = _root(parents, first)
        first = key
