# SPDX-License-Identifier: Apache-2.0
"""Loss weight of each component: the factor by which scalars at the loss scale its gradients.

    weight(root) = 1
    weight(v)    = sum over scalar functions from the loss to v: weight(output) * factor
    factor       = magnitude of the derivative in the table of functions, where it can be read; else 1
    weight(c)    = the largest of its variables; after a layer: the largest of those before it

A factor that cannot be read counts as 1: computed or learned on a GPU, recomputed in backward, NaN, infinity,
division by zero. After a function of degree p without a factor, others count as factor ** p: w counts as 1 in
log(w * loss), and as w ** p in (w * loss) ** p. After a function that is not linear in its gradient, weights
begin at 1. They are rounded down to powers of two, so that dividing by them changes no bit.
"""

from __future__ import annotations

import math
from copy import copy
from ctypes import c_float
from typing import AbstractSet, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

import nnabla as nn
import nnabla.functions as F
import numpy as np

from ..core.components import Components, NodeStructure
from ..core.power_of_two import floor_power_of_two
from ..host_context import host_view
from .description import GraphDescription
from .functions import ONE, Args, Derivative, properties_of
from .loss import Seed
from .memory_uses import origin_of

# Factors by which a data-dependent weight may rise above the one in use, as overflows are that far away, and
# fall below it, which costs nothing once the windows have seen it: losses of batches vary that much.
_ABOVE, _BELOW = 4.0, 16.0

# A factor so far from 1 that each weight that depends on it changes.
_FAR = 2.0**60


class Factor(NamedTuple):
    """Derivative that depends on scalar variables."""

    # Each with the positions that it reads; several if a function reads one variable twice.
    terms: Tuple[Tuple[Derivative, Tuple[int, ...]], ...]
    args: Args
    size: int  # of the input that it belongs to
    fed: bool  # True if it reads only leaves without gradient, which feeders write
    learned: bool  # True if it depends on parameters


class Passage(NamedTuple):
    """Path of the gradient through a scalar function at the loss to one of its inputs."""

    output: int  # position
    input: int  # position
    factor: Union[float, Factor, None]
    degree: float  # exponent of later factors if this one is unknown
    counts: bool  # True if the input counts for its component's weight: scalars beside arrays do not


class ComponentEdge(NamedTuple):
    """Path of the gradient through any other function, from one component to another."""

    output: int  # position of a scalar output; -1: the component counts as a whole
    predecessor: int
    successor: int
    linear: bool  # False if the function is not linear in its gradient, such as a clipping one


class LossWeights:
    """Reads the loss weights of graphs of one structure; `section`: numbers of the functions at the loss."""

    def __init__(
        self,
        nodes: Sequence[NodeStructure],
        section: AbstractSet[int],
        described: GraphDescription,
        components: Components,
        scalars: AbstractSet[int],  # positions of the scalar variables
    ) -> None:
        self._components, self._roots = components, nodes[0].outputs
        # Scalars do not count in a component that has arrays.
        self._root_counts = components.root in components.scalar_components or not scalars >= {*self._roots}
        self._at_loss: List[int] = []  # indices of the scalar functions
        # Positions of the variables that other functions read, and component edges through these.
        self._read_otherwise: Set[int] = set()
        edges: Dict[ComponentEdge, None] = {}
        positions, of = described.inputs.positions, components.of
        for index, node in enumerate(nodes):
            output = node.outputs[0] if node.outputs[0] in scalars else -1
            at_loss = node.number in section and node.linear
            if at_loss and (output >= 0 or scalars >= {*positions[described.inputs.part(node.number)]}):
                self._at_loss.append(index)
                continue
            predecessor = of[node.outputs[0]]
            self._read_otherwise.update(node.inputs)
            successors = {of[p] for p in (*node.inputs, *[s.input for s in node.layer_inputs]) if p in of}
            for successor in successors:
                if successor != predecessor or output >= 0:
                    edges[ComponentEdge(output, predecessor, successor, node.linear)] = None
        self._edges = list(edges)
        self._passages = self._passages_of(nodes, described)
        # The last factors that were read, one for each passage, and the weights that follow from them.
        self._last: Tuple[Optional[Tuple[Optional[float], ...]], Tuple[float, ...]] = None, ()
        # Positions of the fed leaves that factors read.
        fed = [one.factor for one in self._passages if isinstance(one.factor, Factor) and one.factor.fed]
        self._fed = {position for factor in fed for _, read in factor.terms for position in read}
        # True for factors that depend on data: on more than constants and fed leaves.
        of_data = [isinstance(one.factor, Factor) and not one.factor.fed for one in self._passages]
        # True for components whose weights change with such factors; empty if there are none.
        self._data_dependent: List[bool] = []
        if any(of_data):
            near, far = (self._weights([value if one else 1.0 for one in of_data]) for value in (1.0, _FAR))
            self._data_dependent = [one != other for one, other in zip(near, far)]

    def of_alike(self, nodes: Sequence[NodeStructure], described: GraphDescription) -> LossWeights:
        """Adapt to a graph that differs only in shapes and constants."""
        passages = self._passages_of(nodes, described)
        if passages == self._passages:
            return self
        adapted = copy(self)
        adapted._passages, adapted._last = passages, (None, ())
        return adapted

    def before_forward(self, variables: Sequence[nn.Variable], context: nn.Context) -> None:
        """Copy fed leaves to the host and `context`'s device, so that forward and `read` need not wait."""
        if self._fed:
            with nn.context_scope(context):
                for array in [variables[position].data for position in self._fed]:
                    # This gives a value of `fill()` memory on the host, which forward would not.
                    array.get_data("r")
                    # It reads float32 on the device and keeps the host's memory.
                    F.mul_scalar(array, 1.0)

    def read(
        self, variables: Sequence[nn.Variable], *, on_host: bool, in_use: Iterable[Tuple[float, ...]] = ()
    ) -> Tuple[float, ...]:
        """Read the weight of each component, a power of two or 0; unless `on_host`, from fed leaves only."""
        factors = tuple([_read(one.factor, variables, on_host=on_host) for one in self._passages])
        if factors != self._last[0]:
            self._last = factors, self._weights(factors)
        weights = self._last[1]
        # The latest weights `in_use` replace near ones, as they have a schedule.
        if on_host and self._data_dependent:
            return next((one for one in reversed([*in_use]) if self._is_near(weights, one)), weights)
        return weights

    def _is_near(self, weights: Tuple[float, ...], in_use: Tuple[float, ...]) -> bool:
        """True if only data-dependent weights differ, and only as much as a schedule allows."""
        for weight, used, may_differ in zip(weights, in_use, self._data_dependent):
            if weight != used and not (may_differ and weight <= _ABOVE * used and used <= _BELOW * weight):
                return False
        return True

    def _passages_of(self, nodes: Sequence[NodeStructure], described: GraphDescription) -> List[Passage]:
        """Paths through the functions at the loss, in backward order, one for each input with a gradient."""
        components, passages = self._components, []
        for node in map(nodes.__getitem__, self._at_loss):
            read = described.inputs.positions[described.inputs.part(node.number)]
            derivatives = properties_of(node.type_name).derivatives
            for position in node.inputs:
                size = math.prod(described.shapes[position])
                # An input that is read several times has as many derivatives, which are added.
                own = [derivative for one, derivative in zip(read, derivatives) if one == position] or [ONE]
                degree = sum([one.degree(node.args) for one in own])
                factor = _factor(own, node, size, described)
                counts = size != 1 or components.of[position] in components.scalar_components
                passages.append(Passage(node.outputs[0], position, factor, degree, counts))
        return passages

    def _weights(self, factors: Sequence[Optional[float]]) -> Tuple[float, ...]:
        """Weight of each component, as in the module's formulas, from the factor of each passage."""
        weights, of = [0.0] * len(self._components.names), self._components.of
        weights[self._components.root] = float(self._root_counts)
        before_round: List[float] = []
        # A scalar function that other functions lead to needs the weights of the round before.
        while weights != before_round:
            before_round = [*weights]
            # Weight of each variable reached through scalar functions only, as summands by the exponent of
            # later factors: 1, or p after a function of degree p whose factor is unknown.
            of_variables = {root: {1.0: 1.0} for root in self._roots}
            reached_otherwise = {*self._read_otherwise}  # variables that other functions lead to, too
            # Backward order: all contributions to a variable arrive before it is passed on.
            for passage, factor in zip(self._passages, factors):
                weight, arriving = 0.0, of_variables.get(passage.output)
                if arriving is not None:
                    own = of_variables.setdefault(passage.input, {})
                    for exponent, summand in arriving.items():
                        if factor is None:
                            exponent *= passage.degree
                        else:
                            summand *= _power(factor, exponent)
                        summand += own.get(exponent, 0.0)
                        # Powers beyond float64 are unknown.
                        own[exponent] = summand if summand < math.inf else 1.0
                    weight = sum(own.values())
                if arriving is None or passage.output in reached_otherwise:
                    reached_otherwise.add(passage.input)
                    weight = max(weight, weights[of[passage.output]])
                if passage.counts:
                    weights[of[passage.input]] = max(weights[of[passage.input]], weight)
            for edge in self._edges:
                arriving = of_variables.get(edge.output)
                weight = weights[edge.predecessor] if arriving is None else sum(arriving.values())
                if not edge.linear:
                    weight = float(weight > 0.0)  # its gradient does not grow with the loss weight
                weights[edge.successor] = max(weights[edge.successor], weight)
        return tuple([floor_power_of_two(weight) if weight else 0.0 for weight in weights])


def _factor(
    derivatives: Sequence[Derivative], node: NodeStructure, size: int, described: GraphDescription
) -> Union[float, Factor, None]:
    """Factor of a function by one of its inputs, with a derivative for each use of the input."""
    if not any(one.reads for one in derivatives):
        return _magnitude(one.of(node.args, size) for one in derivatives)
    reads = [index for one in derivatives for index in one.reads]
    start = described.inputs.part(node.number).start
    uses = {index: origin_of(described, start + index) for index in reads if index >= 0}
    positions = {index: described.inputs.positions[use] for index, use in uses.items()}
    positions[-1] = node.outputs[0]
    terms = [(one, tuple([positions[index] for index in one.reads])) for one in derivatives]
    # The output, which some derivatives read (-1), may depend on a parameter, and is not fed.
    are_data = (described.producers[use] is None and not described.needs[use] for use in uses.values())
    fed = -1 not in reads and all(are_data)
    learned = -1 in reads or any(_is_learned(described, use) for use in uses.values())
    return Factor(tuple(terms), node.args, size, fed, learned)


def _is_learned(described: GraphDescription, use: int) -> bool:
    """True if an input depends on a parameter."""
    waiting, seen = [use], set()
    while waiting:
        use = waiting.pop()
        producer = described.producers[use]
        if producer is None and described.needs[use]:
            return True
        if producer is not None and producer not in seen:
            seen.add(producer)
            part = described.inputs.part(producer)
            waiting += range(part.start, part.stop)
    return False


def _read(
    factor: Union[float, Factor, None], variables: Sequence[nn.Variable], *, on_host: bool
) -> Optional[float]:
    """Read a factor; None if unknown."""
    if not isinstance(factor, Factor):
        return factor
    if not (factor.fed or on_host):
        return None
    magnitude = _magnitude(
        one.of(factor.args, factor.size, *[_number(variables[p].data, on_host=on_host) for p in positions])
        for one, positions in factor.terms
    )
    if factor.fed or magnitude is None:
        return magnitude
    # As the nearest power of two it changes less often, and weights are computed less often. A learned factor
    # may be 0 by chance in a batch: unknown.
    return floor_power_of_two(magnitude * 2.0**0.5) if magnitude else (None if factor.learned else 0.0)


def _number(array: nn.NdArray, *, on_host: bool) -> float:
    """Value of a scalar; RuntimeError if it was never written."""
    # Arrays that only forward needs are freed.
    if array.clear_called:
        raise RuntimeError
    # `get_data` takes ten times as long, but does not move the array.
    return float(host_view(array)[0] if on_host else array.get_data("r").flat[0])


def _magnitude(terms: Iterable[complex]) -> Optional[float]:
    """Magnitude of a sum of derivatives, as float32; None: NaN, infinite or unreadable."""
    try:
        magnitude = c_float(abs(sum(terms))).value
    except (ArithmeticError, ValueError, RuntimeError):
        return None  # RuntimeError: nnabla raises it for an array that was never written
    return magnitude if magnitude < math.inf else None


def _power(factor: float, power: float) -> float:
    """Factor to the power of a function's degree; only 0 gives 0; 1 beyond float64."""
    try:
        return (factor**power or 1.0) if factor else 0.0
    except OverflowError:
        return 1.0


def seed_weight(grad: Seed, *, on_host: bool) -> float:
    """Power of two at or below the largest magnitude of a seed gradient; 1 if unknown."""
    if isinstance(grad, nn.NdArray):
        if not on_host:
            return 1.0
        grad = host_view(grad)
    largest = float(np.max(np.abs(grad), initial=0.0))
    return floor_power_of_two(largest) if 0.0 < largest < math.inf else 1.0
