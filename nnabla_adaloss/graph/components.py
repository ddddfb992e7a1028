# SPDX-License-Identifier: Apache-2.0
"""Which gradients carry one scale because functions that only pass a scale on connect them."""

from __future__ import annotations

from typing import AbstractSet, Dict, FrozenSet, Iterable, List, Mapping, NamedTuple, Sequence, Set

from .node import NodeStructure


class Components(NamedTuple):
    """The connected components of a graph's gradients. Variables go by position, functions by number.

    Attributes:
        of: component of each variable that gets a gradient and is no leaf; and of leaves that are the scaled
            input of a layer.
        names: name of each component: of the function that its first gradient in backward order is the output
            gradient of.
        producers: the component of each function's output gradient.
        handed_over: gradients that a function brings to the scale of the component behind it.
        single: names of the components in which every gradient has one element.
        next: of each component, those that its gradients are turned into.
        leaves: the component of the first function that writes the gradient of each leaf.
    """

    of: Dict[int, int]
    names: List[str]
    producers: Dict[int, int]
    handed_over: FrozenSet[int]
    single: FrozenSet[str]
    next: Sequence[AbstractSet[int]]
    leaves: Mapping[int, int]

    def behind(self, first: int) -> Set[int]:
        """A component, and all that backward computes from its gradients."""
        found, waiting = {first}, [first]
        while waiting:
            new = self.next[waiting.pop()] - found
            found |= new
            waiting += new
        return found


def components_of(nodes: Sequence[NodeStructure], sizes: Sequence[int], *, by_layer: bool) -> Components:
    """The components of the gradients of a graph.

    Functions of one element at the loss (a loss weight, a mean before it spreads) can take any scale, so they
    separate components, as functions do whose gradient is not linear in the output gradient.

    Args:
        nodes: the functions, in backward order.
        sizes: the number of elements of each variable, by position; 2 stands for several.
        by_layer: whether layers separate components too.
    """
    sets = _DisjointSets()
    for node in nodes:
        sets.connect(node.outputs)
        targets = {slot.target for slot in node.slots} if by_layer else set()
        for slot in node.slots:
            # A leaf's gradient is kept in an array of its own.
            if slot.to_leaf and by_layer:
                sets.connect([slot.target])
        passed_on = [position for position in node.inputs if position not in targets]
        sets.connect(passed_on if node.separates else [*node.outputs[:1], *passed_on])
        sets.connect(targets & set(node.inputs), join=False)
    return _numbered(nodes, sizes, sets)


def _numbered(nodes: Sequence[NodeStructure], sizes: Sequence[int], sets: _DisjointSets) -> Components:
    of: Dict[int, int] = {}
    names: List[str] = []
    numbers: Dict[int, int] = {}

    def number(position: int, name: str) -> int:
        root = sets.root(position)
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
            if slot.target not in of and sets.knows(slot.target):
                of[slot.target] = number(slot.target, f"{slot.layer}:input")
        # Computed by a function that backward does not visit, and wanted all the same, as nn.grad does.
        for position in node.inputs:
            if position not in of:
                of[position] = number(position, f"{node.label}:input")
    handed_over = frozenset(position for node in nodes if node.separates for position in node.outputs)
    several = {component for position, component in of.items() if sizes[position] != 1}
    single = frozenset(name for index, name in enumerate(names) if index not in several)
    following: List[Set[int]] = [set() for _ in names]
    for node in nodes:
        own = producers[node.number]
        following[own].update(of[p] for p in node.inputs)
        following[own].update(of[slot.target] for slot in node.slots if slot.target in of)
        following[own].discard(own)
    leaves = {leaf: producers[node.number] for node in reversed(nodes) for leaf in node.leaves}
    return Components(of, names, producers, handed_over, single, following, leaves)


class _DisjointSets:
    """Union-find over positions."""

    def __init__(self) -> None:
        self._parents: Dict[int, int] = {}

    def knows(self, key: int) -> bool:
        """Whether `key` was ever named."""
        return key in self._parents

    def root(self, key: int) -> int:
        """The representative of the set of `key`."""
        parents = self._parents
        while parents[key] != key:
            parents[key] = key = parents[parents[key]]
        return key

    def connect(self, keys: Iterable[int], *, join: bool = True) -> None:
        """Make one set of `keys`, or with join=False only know them."""
        first = None
        for key in keys:
            self._parents.setdefault(key, key)
            if join and first is not None:
                self._parents[self.root(key)] = self.root(first)
            first = key
