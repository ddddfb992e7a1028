# SPDX-License-Identifier: Apache-2.0
"""Names of functions that do not change when a network is rebuilt.

A function is named after the scope of its parameters. One without parameters gets the scope that its nearest
producer and its nearest consumer share, or else that of the producer, and its type:
`block0/attn/BatchMatmul`. Names that occur several times are numbered in forward order: `rnn/affine`,
`rnn/affine#2`, ...
"""

from __future__ import annotations

from itertools import takewhile
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import nnabla as nn
from nnabla.parameter import get_current_parameter_scope
from nnabla.solver import Solver

from .description import GraphDescription
from .functions import is_matrix_product

Parameters = Union[Mapping[str, nn.Variable], Callable[[], Mapping[str, nn.Variable]], None]
"""Parameters by name, or a function that returns them."""

ParameterNames = Mapping[int, str]
"""Full names of parameters, by variable key (`hash(variable)`)."""


def registered_names() -> Dict[int, str]:
    """Names of all parameters in nnabla's current scope, by variable key."""
    return names_of(dict(parameters_in(get_current_parameter_scope())))


def parameters_in(scope: Mapping[str, Any], path: str = "") -> Iterator[Tuple[str, nn.Variable]]:
    """Parameters of a scope with their names; nnabla.get_parameters takes ten times as long."""
    for name, entry in scope.items():
        if isinstance(entry, dict):
            yield from parameters_in(entry, f"{path}{name}/")
        else:
            yield path + name, entry


def names_of(parameters: Parameters) -> Dict[int, str]:
    """Names of the given parameters, by variable key; none for None."""
    by_name = (parameters() if callable(parameters) else parameters) or {}
    return {hash(v): name for name, v in by_name.items()}


def must_override(solver: Any, method: str) -> str:
    """Error message for a solver written in Python that inherits a method of nnabla's solvers in C++."""
    return f"{type(solver).__name__} must override {method}(), as it is written in Python"


def check_parameters(name: str, value: Parameters) -> Parameters:
    """Return `value`; TypeError unless it is a mapping of Variables by name, a function of one, or None."""
    solver = getattr(value, "__self__", None)
    if type(solver) is not Solver and getattr(value, "__func__", None) is Solver.get_parameters:
        raise TypeError(f"{name}: {must_override(solver, 'get_parameters')}")
    if not (value is None or callable(value) or isinstance(value, Mapping)):
        raise TypeError(
            f"{name} must be a mapping of Variables by name, or a function that returns one, such as "
            f"solver.get_parameters; got {type(value).__name__}"
        )
    return value


def function_names(graph: GraphDescription) -> List[str]:
    """Unique name of each function of a graph, in forward order."""
    producers = graph.inputs.by_function(graph.producers)
    scopes = _own_scopes(graph, producers)
    products = [is_matrix_product(type_name) for type_name in graph.type_names]
    scopes_of_products = {scope for scope, product in zip(scopes, products) if product}
    # From each function to its producers, in forward order.
    edges = [(index, one) for index, own in enumerate(producers) for one in own if one is not None]
    of_producers = _nearest_scopes(edges, scopes)
    of_consumers = _nearest_scopes([(producer, index) for index, producer in reversed(edges)], scopes)
    names: Dict[str, None] = {}
    numbers: Dict[str, int] = {}  # the last number given to a name
    for index, type_name in enumerate(graph.type_names):
        scope = scopes[index]
        # The product has the scope's name; its other functions are named after their type, too.
        if scope and (products[index] or scope not in scopes_of_products):
            base = scope
        else:
            around = scope or _shared(of_producers[index], of_consumers[index])
            base = f"{around}/{type_name}" if around else type_name
        name, number = base, numbers.get(base, 1)
        while name in names:
            number += 1
            name = f"{base}#{number}"
        numbers[base] = number
        names[name] = None
    return list(names)


def _own_scopes(graph: GraphDescription, producers: Sequence[Sequence[Optional[int]]]) -> List[str]:
    """Scope of the first parameter that each function reads besides its data; empty for none."""
    of_leaves = {p: name.rpartition("/")[0] or name for p, (_, name) in graph.kept.items() if name}
    uses = zip(graph.inputs.positions, graph.producers)
    read = [of_leaves.get(position) if producer is None else None for position, producer in uses]
    # Scope of each function that reads parameters alone, as a weight's normalization: its output is a weight.
    weights: Dict[Optional[int], str] = {}
    scopes: List[str] = []
    for index, of_inputs in enumerate(graph.inputs.by_function(read)):
        if weights:
            of_inputs = [scope or weights.get(one) for scope, one in zip(of_inputs, producers[index])]
        if of_inputs and None not in of_inputs:
            weights[index] = of_inputs[0]
        # The first input is data, to which the parameters are applied.
        scopes.append(next(filter(None, of_inputs[1:]), "") if len(of_inputs) > 1 else "")
    return scopes


def _nearest_scopes(edges: Sequence[Tuple[int, int]], scopes: Sequence[str]) -> List[str]:
    """Scope of each function, or that of the nearest function with one. `edges`: from functions to their
    neighbours in one direction, in an order in which a neighbour's own edges come first.
    """
    # Distance of the nearest scope, and the scope.
    nearest = {index: (0, scope) for index, scope in enumerate(scopes) if scope}
    for index, neighbour in edges:
        if neighbour in nearest:
            distance, scope = nearest[neighbour]
            if index not in nearest or distance + 1 < nearest[index][0]:
                nearest[index] = distance + 1, scope
    return [nearest.get(index, (0, ""))[1] for index in range(len(scopes))]


def _shared(producer: str, consumer: str) -> str:
    """First parts that the scopes of a producer and a consumer share; else the producer's, or either's."""
    pairs = zip(producer.split("/"), consumer.split("/"))
    shared = [own for own, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    return "/".join(shared) or producer or consumer
