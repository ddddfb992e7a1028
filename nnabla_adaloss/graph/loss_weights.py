# SPDX-License-Identifier: Apache-2.0
"""The loss weight of each component: what constants at the loss make of its gradients, known before backward.

    weight(root) = 1
    weight(v)    = sum over the functions of one element that lead from the loss to v: weight(output) * factor
    factor       = magnitude of the derivative in the table of functions, where it can be read; else 1
    weight(c)    = the largest of its variables; of a component behind a layer: of those before it

What cannot be read counts as 1: what is computed or learned on a GPU, a function such as `loss ** 2`, NaN,
infinity, a division by zero. So does what lies behind a function that is not linear in its gradient. Weights
are rounded down to powers of two, so that to divide by them changes no bit.
"""

from __future__ import annotations

import math
from copy import copy
from typing import AbstractSet, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

import nnabla as nn
import numpy as np

from ..core.components import Components, NodeStructure
from ..core.power_of_two import floor_power_of_two
from ..host_context import host_view
from .description import GraphDescription
from .functions import Derivative, known
from .loss import Seed
from .matrix_products import Args


class Factor(NamedTuple):
    """A derivative that depends on a variable of one element."""

    derivative: Derivative
    args: Args
    size: int  # of the input that it belongs to
    position: int
    fed: bool  # whether the variable is a leaf without gradient, such as feeders write


class Passage(NamedTuple):
    """The way of the gradient through a function at the loss that computes one element, or from single ones,
    to one of its inputs.
    """

    output: int  # position
    before: int  # component of the output
    input: int  # position
    after: int
    factor: Union[float, Factor]
    counts: bool  # whether `after` is weighed by it: single elements weigh nothing beside arrays


class ComponentEdge(NamedTuple):
    """Edge of the gradient through another function, from one component to another."""

    output: int  # position, where that is a single element; -1: all that the component holds is one way
    before: int
    after: int
    limited: bool  # whether the function is not linear in its gradient


class LossWeights:
    """Reads the loss weights in graphs of one structure; `section`: numbers of the functions at the loss."""

    def __init__(
        self,
        nodes: Sequence[NodeStructure],
        section: AbstractSet[int],
        described: GraphDescription,
        components: Components,
    ) -> None:
        self._components, self._roots = components, nodes[0].outputs
        shapes = described.shapes
        single = components.root in components.single
        self._root_counts = single or any(math.prod(shapes[position]) != 1 for position in self._roots)
        self._at_loss: List[int] = []  # indices of the functions of one element
        # Positions of the variables that other functions read.
        self._read_otherwise: Set[int] = set()
        ways: Dict[ComponentEdge, None] = {}
        for index, node in enumerate(nodes):
            output, before = node.outputs[0], components.producers[node.number]
            first = output if math.prod(shapes[output]) == 1 else -1
            read = described.inputs.positions[described.inputs.part(node.number)]
            of_one = first >= 0 or all(math.prod(shapes[position]) == 1 for position in read)
            if of_one and node.number in section and not node.non_homogeneous:
                self._at_loss.append(index)
                continue
            self._read_otherwise.update(node.inputs)
            behind = {components.of[p] for p in node.inputs}
            behind.update(components.of[s.target] for s in node.slots if s.target in components.of)
            for after in behind:
                if after != before or first >= 0:
                    ways[ComponentEdge(first, before, after, node.non_homogeneous)] = None
        self._ways = list(ways)
        self._passages = self._passages_of(nodes, described)
        self._constants = _constants_of(self._passages)
        # The last factors, and the weights that follow from them.
        self._last: Tuple[Tuple[float, ...], Tuple[float, ...]] = ((), ())

    def of_alike(self, nodes: Sequence[NodeStructure], described: GraphDescription) -> LossWeights:
        """The same for graphs that differ in shapes and constants alone."""
        passages = self._passages_of(nodes, described)
        if passages == self._passages:
            return self
        found = copy(self)
        found._passages, found._constants, found._last = passages, _constants_of(passages), ((), ())
        return found

    def read(self, variables: Sequence[nn.Variable], *, on_host: bool) -> Tuple[float, ...]:
        """The weight of each component, a power of two or 0, from variables as they are now, by position.

        `on_host`: all arrays can be read without waiting. Otherwise only what feeders write is read.
        """
        factors = self._constants
        if factors is None:
            factors = tuple([_read(one.factor, variables, on_host=on_host) for one in self._passages])
        if factors != self._last[0] or not self._last[1]:
            self._last = factors, self._weights(factors)
        return self._last[1]

    def _passages_of(self, nodes: Sequence[NodeStructure], described: GraphDescription) -> List[Passage]:
        components, found = self._components, []
        for node in map(nodes.__getitem__, self._at_loss):
            part = described.inputs.part(node.number)
            read, producers = described.inputs.positions[part], described.producers[part]
            by_input = dict(zip(read, known(node.type_name).derivatives))
            for position in node.inputs:
                size = math.prod(described.shapes[position])
                factor: Union[float, Factor] = 1.0
                derivative = by_input.get(position)
                # Of x times x, each input would be counted apart.
                if derivative is not None and read.count(position) == 1:
                    other = derivative.reads
                    if other is None:
                        factor = _magnitude(derivative, node.args, size)
                    else:
                        fed = producers[other] is None and not described.needs[part][other]
                        factor = Factor(derivative, node.args, size, read[other], fed)
                before, after = components.producers[node.number], components.of[position]
                counts = size != 1 or after in components.single
                found.append(Passage(node.outputs[0], before, position, after, factor, counts))
        return found

    def _weights(self, factors: Sequence[float]) -> Tuple[float, ...]:
        found = [0.0] * len(self._components.names)
        found[self._components.root] = float(self._root_counts)
        risen = True
        while risen:
            risen = False
            # Of what comes from the loss through functions of one element alone; and what else comes, too.
            of_variables, of_others = dict.fromkeys(self._roots, 1.0), {*self._read_otherwise}
            # In backward order, so that what a function hands on has all arrived.
            for one, factor in zip(self._passages, factors):
                weight, arriving = 0.0, of_variables.get(one.output)
                if arriving is not None:
                    weight = of_variables.get(one.input, 0.0) + arriving * factor
                    # Beyond float64 nothing is known.
                    of_variables[one.input] = weight = weight if weight < math.inf else 1.0
                if arriving is None or one.output in of_others:
                    of_others.add(one.input)
                    weight = max(weight, found[one.before])
                if one.counts and weight > found[one.after]:
                    found[one.after], risen = weight, True
            for way in self._ways:
                weight = of_variables.get(way.output, found[way.before])
                if way.limited:
                    weight = float(weight > 0.0)
                if weight > found[way.after]:
                    found[way.after], risen = weight, True
        return tuple([floor_power_of_two(weight) if weight else 0.0 for weight in found])


def _constants_of(passages: Sequence[Passage]) -> Optional[Tuple[float, ...]]:
    """The factors, if all of them are constant."""
    factors = tuple([one.factor for one in passages if not isinstance(one.factor, Factor)])
    return factors if len(factors) == len(passages) else None


def _read(factor: Union[float, Factor], variables: Sequence[nn.Variable], *, on_host: bool) -> float:
    """A factor; 1 where it is not known."""
    if not isinstance(factor, Factor):
        return factor
    array = variables[factor.position].data
    # The memory of what only forward needed is free.
    if not (factor.fed or on_host) or array.clear_called:
        return 1.0
    try:
        # `get_data` takes ten times as long, but leaves the array where it is.
        value = float(host_view(array)[0] if on_host else array.get_data("r").flat[0])
    except RuntimeError:
        # nnabla's word for an array that was never written.
        return 1.0
    return _magnitude(factor.derivative, factor.args, factor.size, value)


def _magnitude(derivative: Derivative, args: Args, size: int, value: float = math.nan) -> float:
    """The magnitude of a derivative; 1 where that is not a number."""
    try:
        found = abs(derivative.of(args, size, value))
    except ArithmeticError:
        return 1.0
    return found if found < math.inf else 1.0


def seed_weight(grad: Seed, *, on_host: bool) -> float:
    """Loss weight of a seed gradient: the power of two at or below its largest magnitude; 1 where that is 0,
    not finite, or on a device from which it would have to be fetched.
    """
    if isinstance(grad, nn.NdArray):
        if not on_host:
            return 1.0
        grad = host_view(grad)
    largest = float(np.max(np.abs(grad), initial=0.0))
    return floor_power_of_two(largest) if 0.0 < largest < math.inf else 1.0
