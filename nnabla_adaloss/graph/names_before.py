# SPDX-License-Identifier: Apache-2.0
"""What functions were called in version 0.1, for reading states that were saved by it."""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence

from .reading import GraphDescription


def function_names_before(graph: GraphDescription, order: Sequence[int]) -> Dict[int, str]:
    """The name of each function, by index: numbered in backward order, as in `rnn/affine[1]`.

    Args:
        graph: the graph.
        order: indices of the functions that backward visits, in its order.
    """
    # What the inputs of each function go back to, by way of first inputs: positions of leaves.
    origins: List[List[Optional[int]]] = []
    for part in graph.inputs.by_function():
        uses = zip(graph.inputs.positions[part], graph.producers[part])
        origins.append(
            [p if producer is None else next(iter(origins[producer]), None) for p, producer in uses]
        )
    names: Dict[int, str] = {}
    counts: Dict[str, int] = {}
    for index in order:
        scopes = (_scope(graph, origin) for origin in origins[index][1:])
        scope = next((s for s in scopes if s), graph.type_names[index])
        number = counts.get(scope, 0)
        counts[scope] = number + 1
        names[index] = scope if number == 0 else f"{scope}[{number}]"
    return names


def _scope(graph: GraphDescription, origin: Optional[int]) -> str:
    name = (None if origin is None else graph.kept.get(origin, (0, None))[1]) or ""
    return name.rsplit("/", 1)[0] if "/" in name else name
