# SPDX-License-Identifier: Apache-2.0
"""Description of a graph by values; equal for graphs built in the same way."""

from __future__ import annotations

import heapq
from types import MappingProxyType
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Set, Tuple

import nnabla as nn

HALF = ":half", ":mixed_half"
"""Ends of the names of backends that compute in half precision."""


def type_name_of(name: Any) -> str:
    """Name of a function's type from its `info`; a PythonFunction may have a method for it."""
    return name if isinstance(name, str) else str(name() if callable(name) else name)


class Uses(NamedTuple):
    """Variables that the functions of a graph read or write, concatenated."""

    ends: List[int]  # end of each function's entries
    positions: List[int]  # positions of the variables

    def part(self, index: int) -> slice:
        """Slice of one function's entries."""
        return slice(self.ends[index - 1] if index else 0, self.ends[index])

    def by_function(self, of_each: Optional[List[Any]] = None) -> List[List[Any]]:
        """Positions by function, or the corresponding elements of `of_each`."""
        values = self.positions if of_each is None else of_each
        return list(map(values.__getitem__, map(slice, [0, *self.ends], self.ends)))


class GraphDescription(NamedTuple):
    """Properties of a graph that plans need, by value: functions in forward order, variables by position."""

    type_names: List[str]
    args: List[Mapping[str, Any]]
    backends: List[List[str]]
    need_grads: List[bool]  # True if backward visits the function
    inputs: Uses
    needs: List[bool]  # True if the input needs a gradient
    producers: List[Optional[int]]  # function that computes the input; None for leaves
    outputs: Uses
    shapes: List[Tuple[int, ...]]
    recomputed: List[bool]  # True if the variable is recomputed in backward
    # Key and name of leaves that stay in a rebuilt graph: those with a gradient or a name, by position.
    kept: Dict[int, Tuple[int, Optional[str]]]
    # For leaves that share a gradient array, as a weight and its reshaped view do: the first of them.
    shared_gradients: Mapping[int, int] = MappingProxyType({})

    def reads(self, f: Any, index: int, position: int) -> bool:
        """True if backward of the function `f` with this index reads the data of one of its variables."""
        inputs, outputs = self.inputs.part(index), self.outputs.part(index)
        read = [i for i, p in enumerate(self.inputs.positions[inputs]) if p == position]
        written = [o for o, p in enumerate(self.outputs.positions[outputs]) if p == position]
        return any(
            any(may_depend(f.grad_depends_input_data, i, j) for j in read)
            or any(may_depend(f.grad_depends_output_data, i, o) for o in written)
            for i, need in enumerate(self.needs[inputs])
            if need
        )

    @property
    def in_half(self) -> List[int]:
        """Indices of the functions that compute in half precision: by the first backend, if there is any."""
        return [i for i, names in enumerate(self.backends) if names and names[0].endswith(HALF)]


def may_depend(depends: Callable[[int, int], bool], of: int, on: int) -> bool:
    """True if nnabla reports that a gradient depends on an array, or does not know."""
    try:
        return depends(of, on)
    except (NotImplementedError, SystemError):
        return True


def visited(loss: nn.Variable) -> Tuple[List[Any], List[List[nn.Variable]], List[List[Any]]]:
    """List the functions of `loss` in forward order, their inputs, and the producers of these or None."""
    # Not by `Variable.visit`, which keeps its callback, and so the graph, in a reference cycle.
    found: List[Tuple[Any, List[nn.Variable], List[Any]]] = []
    seen: Set[Any] = set()
    waiting: List[Any] = [loss.parent]
    # Depth first, first inputs first. A function waits as a tuple until its producers have been found.
    while waiting:
        f = waiting.pop()
        if type(f) is tuple:
            found.append(f)
        elif f not in seen:
            seen.add(f)
            inputs = f.inputs
            producers = [v.parent for v in inputs]
            waiting.append((f, inputs, producers))
            waiting += [producer for producer in reversed(producers) if producer is not None]
    functions, inputs_of, producers_of = zip(*found)
    return list(functions), list(inputs_of), list(producers_of)


def backward_order(described: GraphDescription) -> List[int]:
    """Numbers of the functions that backward visits, in its order: by rank in forward, then as reached."""
    producers_of = described.inputs.by_function(described.producers)
    needs_of = described.inputs.by_function(described.needs)
    # Rank: the longest path from a leaf. nnabla's own ranks differ before forward, and in rewired graphs.
    ranks: List[int] = []
    for producers in producers_of:
        ranks.append(1 + max([ranks[p] for p in producers if p is not None], default=0))
    order: List[int] = []
    last = len(described.type_names) - 1
    # A heap: the highest rank first, of equal ones the first that was reached.
    waiting = [(-ranks[last], 1, last)] if described.need_grads[last] else []
    seen = {last}
    while waiting:
        index = heapq.heappop(waiting)[2]
        order.append(index)
        for producer, need in zip(producers_of[index], needs_of[index]):
            if need and producer not in seen and producer is not None and described.need_grads[producer]:
                seen.add(producer)
                heapq.heappush(waiting, (-ranks[producer], len(seen), producer))
    return order
