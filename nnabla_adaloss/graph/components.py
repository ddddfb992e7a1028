# SPDX-License-Identifier: Apache-2.0
"""Which gradients carry one scale because functions that only pass a scale on connect them."""

from __future__ import annotations

from typing import Dict, FrozenSet, Iterable, List, Mapping, NamedTuple

from .node import Node


class Components(NamedTuple):
    """The connected components of a graph's gradients.

    Attributes:
        of: component of each variable that is no leaf, by variable key; and of leaves that are the scaled
            input of a layer.
        names: name of each component: of the function that its first gradient in backward order is the output
            gradient of.
        producers: index of the component that the gradient of a function's output is in, by function key.
        handed_over: keys of the gradients that a function brings to the scale of the component behind it.
        single: names of the components in which every gradient has one element.
    """

    of: Dict[int, int]
    names: List[str]
    producers: Dict[int, int]
    handed_over: FrozenSet[int]
    single: FrozenSet[str]

    def renamed(self, variables: Mapping[int, int], functions: Mapping[int, int]) -> Components:
        """The same with other keys; by the ones that there are."""
        return self._replace(
            of={variables[key]: component for key, component in self.of.items()},
            producers={functions[key]: component for key, component in self.producers.items()},
            handed_over=frozenset(variables[key] for key in self.handed_over),
        )


def components_of(nodes: Iterable[Node], *, by_layer: bool) -> Components:
    """The components of the functions `nodes`, which come in backward order.

    Functions of one element at the loss (a loss weight, a mean before it spreads) can take any scale, so they
    separate components, as functions do whose gradient is not linear in the output gradient.

    Args:
        nodes: the functions.
        by_layer: whether layers separate components too.
    """
    nodes = list(nodes)
    sets = _DisjointSets()
    for node in nodes:
        sets.connect(node.output_keys)
        targets = {s.target_key for s in node.scalings} if by_layer else set()
        for scaling in node.scalings:
            # A leaf's gradient is kept in an array of its own.
            if scaling.to_leaf and by_layer:
                sets.connect([scaling.target_key])
        passed_on = [key for key in node.input_keys if key not in targets]
        sets.connect(passed_on if separates(node) else [*node.output_keys[:1], *passed_on])
        sets.connect(targets & set(node.input_keys), join=False)
    return _numbered(nodes, sets)


def separates(node: Node) -> bool:
    """Whether input gradients of `node` may carry another scale than its output gradient, with no layer."""
    return node.non_homogeneous or (
        node.loss_section and node.single is not None and node.outputs[0].size == 1
    )


def _numbered(nodes: List[Node], sets: _DisjointSets) -> Components:
    of: Dict[int, int] = {}
    names: List[str] = []
    numbers: Dict[int, int] = {}

    def number(key: int, name: str) -> int:
        root = sets.root(key)
        if root not in numbers:
            numbers[root] = len(names)
            names.append(name)
        return numbers[root]

    producers: Dict[int, int] = {}
    for node in nodes:
        for key in node.output_keys:
            of[key] = number(key, node.label)
        producers[node.function_key] = of[node.output_keys[0]]
    for node in nodes:
        for scaling in node.scalings:
            key = scaling.target_key
            if key not in of and scaling.to_leaf and sets.knows(key):
                of[key] = number(key, f"{scaling.layer}:input")
    handed_over = frozenset(key for node in nodes if separates(node) for key in node.output_keys)
    several = {of[key] for node in nodes for v, key in zip(node.outputs, node.output_keys) if v.size != 1}
    several.update(
        of[s.target_key] for node in nodes for s in node.scalings if s.target_key in of and s.target.size != 1
    )
    single = frozenset(name for index, name in enumerate(names) if index not in several)
    return Components(of, names, producers, handed_over, single)


class _DisjointSets:
    """Union-find over keys."""

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
