# SPDX-License-Identifier: Apache-2.0
"""Names of functions that do not change when a network is built again.

A function is named after the scope of its parameters. One without parameters gets the scope that its nearest
producer and its nearest consumer share, or else that of the nearer of both, and its type:
`block0/attn/BatchMatmul`. Names that occur several times are numbered in forward order: `rnn/affine`,
`rnn/affine#2`, ...
"""

from __future__ import annotations

from itertools import count
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set

import nnabla as nn

from .matrix_products import is_matrix_product

ParameterNames = Mapping[int, str]
"""Full names of parameters, by variable key (`hash(variable)`)."""


def registered_names() -> Dict[int, str]:
    """The names of all parameters that nnabla has in the current scope."""
    return named(nn.get_parameters(grad_only=False))


def named(parameters: Mapping[str, nn.Variable]) -> Dict[int, str]:
    """Names by variable key, from Variables by name: what solvers and modules call their parameters."""
    return {hash(v): name for name, v in parameters.items()}


def function_names(functions: Sequence[Any], parameters: ParameterNames) -> Dict[int, str]:
    """A unique name for each function, by function key (`hash(function)`).

    Args:
        functions: all functions of a graph, in forward order.
        parameters: the names of the parameters.

    Example:
        >>> import nnabla as nn, nnabla.functions as F, nnabla.parametric_functions as PF
        >>> from nnabla_adaloss.graph.order import forward_order
        >>> h = nn.Variable((2, 3))
        >>> for _ in range(2):
        ...     h = F.relu(PF.affine(h, 3, name="rnn"))
        >>> list(function_names(forward_order(h), registered_names()).values())
        ['rnn/affine', 'rnn/affine/ReLU', 'rnn/affine#2', 'rnn/affine/ReLU#2']
    """
    scopes = _own_scopes(functions, parameters)
    products = {scopes[hash(f)] for f in functions if is_matrix_product(f.info.type_name)}
    around = _scopes_around(functions, scopes)
    names: Dict[int, str] = {}
    taken: Set[str] = set()
    for f in functions:
        key, type_name = hash(f), f.info.type_name
        scope = scopes[key]
        if scope and (is_matrix_product(type_name) or scope not in products):
            base = scope
        else:
            base = "/".join(part for part in (scope or around[key], type_name) if part)
        numbered = (base if i == 1 else f"{base}#{i}" for i in count(1))
        names[key] = next(name for name in numbered if name not in taken)
        taken.add(names[key])
    return names


def _own_scopes(functions: Sequence[Any], parameters: ParameterNames) -> Dict[int, str]:
    """The scope of the first parameter that each function reads beside its data; empty: there is none."""
    # Functions of parameters only, such as a weight's normalization: what they compute is a weight, too.
    weights: Dict[int, Optional[str]] = {}

    def scope_of(v: nn.Variable) -> Optional[str]:
        if v.parent is not None:
            return weights[hash(v.parent)]
        name = parameters.get(hash(v))
        return None if name is None else name.rpartition("/")[0] or name

    scopes: Dict[int, str] = {}
    for f in functions:
        found = [scope_of(v) for v in f.inputs]
        weights[hash(f)] = found[0] if found and None not in found else None
        # The first input is what the parameters are applied to.
        scopes[hash(f)] = next((scope for scope in found[1:] if scope), "")
    return scopes


class _Neighbour(NamedTuple):
    """The nearest function with a scope, in one direction."""

    distance: int
    scope: str


def _scopes_around(functions: Sequence[Any], scopes: Mapping[int, str]) -> Dict[int, str]:
    """For each function the scope that it stands in, judged by the functions before and behind it."""
    producers: Dict[int, _Neighbour] = {}
    consumers: Dict[int, _Neighbour] = {}
    parents: Dict[int, List[int]] = {}
    for f in functions:
        parents[hash(f)] = [hash(v.parent) for v in f.inputs if v.parent is not None]
        _note_nearest(producers, hash(f), parents[hash(f)], scopes)
    for f in reversed(functions):
        for parent in parents[hash(f)]:
            _note_nearest(consumers, parent, [hash(f)], scopes)
    return {hash(f): _between(producers.get(hash(f)), consumers.get(hash(f))) for f in functions}


def _note_nearest(
    found: Dict[int, _Neighbour], key: int, neighbours: Sequence[int], scopes: Mapping[int, str]
) -> None:
    for neighbour in neighbours:
        if scopes[neighbour]:
            here = _Neighbour(1, scopes[neighbour])
        elif neighbour in found:
            here = _Neighbour(found[neighbour].distance + 1, found[neighbour].scope)
        else:
            continue
        if key not in found or here.distance < found[key].distance:
            found[key] = here


def _between(producer: Optional[_Neighbour], consumer: Optional[_Neighbour]) -> str:
    if producer is None or consumer is None:
        nearest = producer or consumer
        return "" if nearest is None else nearest.scope
    shared: List[str] = []
    for a, b in zip(producer.scope.split("/"), consumer.scope.split("/")):
        if a != b:
            break
        shared.append(a)
    return "/".join(shared) or min(producer, consumer, key=lambda neighbour: neighbour.distance).scope
