# SPDX-License-Identifier: Apache-2.0
"""A graph described by values, in which two that are built alike are equal."""

from __future__ import annotations

from operator import attrgetter
from types import MappingProxyType
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

import nnabla as nn

_parent = attrgetter("parent")


def is_half(backends: Sequence[str]) -> bool:
    """Whether the first of the `backends` of a context is one of half precision."""
    return bool(backends) and backends[0].endswith((":half", ":mixed_half"))


def type_name_of(name: Any) -> str:
    """Name of a function's type, as its `info` holds it: a PythonFunction may have a method for it."""
    return name if isinstance(name, str) else str(name() if callable(name) else name)


class Uses(NamedTuple):
    """What the functions of a graph read or write, one entry after the other for all of them."""

    ends: List[int]  # where those of each function end
    positions: List[int]  # which variables they are

    def part(self, index: int) -> slice:
        """Where the entries of one function are."""
        return slice(self.ends[index - 1] if index else 0, self.ends[index])

    def by_function(self, of_each: Optional[List[Any]] = None) -> List[List[Any]]:
        """The positions that belong to each function, or what `of_each` holds in their places."""
        values = self.positions if of_each is None else of_each
        return [values[start:end] for start, end in zip([0, *self.ends], self.ends)]


class GraphDescription(NamedTuple):
    """All that plans ask of a graph, by value: functions in forward order, variables by position."""

    type_names: List[str]
    args: List[Mapping[str, Any]]
    backends: List[List[str]]
    need_grads: List[bool]  # whether backward visits them
    inputs: Uses
    needs: List[bool]  # whether each of the inputs needs a gradient
    producers: List[Optional[int]]  # the function that each of the inputs comes from; None for leaves
    outputs: Uses
    shapes: List[Tuple[int, ...]]
    recomputed: List[bool]  # whether what is in a variable is computed again in backward
    # By position the key and the name of leaves that are the same in the next graph: those that need a
    # gradient, and those that have a name.
    kept: Dict[int, Tuple[int, Optional[str]]]
    # Of leaves whose gradients are one array, as of a weight and its reshaped view: the first one, which
    # stands for all of them.
    one_gradient: Mapping[int, int] = MappingProxyType({})

    def reads(self, f: Any, index: int, position: int) -> bool:
        """Whether backward of the function with this index, `f`, reads what one of its variables holds."""
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
        """Indices of the functions that compute in half precision."""
        # Most graphs have a single context.
        half = {name for name in {backend[0] for backend in self.backends if backend} if is_half([name])}
        if not half:
            return []
        return [i for i, backend in enumerate(self.backends) if backend and backend[0] in half]


def may_depend(depends: Callable[[int, int], bool], of: int, on: int) -> bool:
    """Whether a gradient depends on an array, as nnabla tells; in a function that does not tell it may."""
    try:
        return depends(of, on)
    except (NotImplementedError, SystemError):
        return True


def visited(loss: nn.Variable) -> Tuple[List[Any], List[List[nn.Variable]], List[List[Any]]]:
    """The functions behind `loss` in forward order, their inputs, and the producers of these or None."""
    # `Variable.visit` would keep its argument, and so the graph, in a reference cycle.
    functions: List[Any] = []
    inputs: List[List[nn.Variable]] = []
    parents: List[List[Any]] = []
    seen: Set[Any] = set()
    waiting: List[Any] = [loss.parent]
    # What a function reads comes before it, first inputs first.
    while waiting:
        f = waiting.pop()
        if type(f) is tuple:
            functions.append(f[0])
            inputs.append(f[1])
            parents.append(f[2])
        elif f not in seen:
            seen.add(f)
            own = f.inputs
            behind = list(map(_parent, own))
            waiting.append((f, own, behind))
            for parent in reversed(behind):
                if parent is not None:
                    waiting.append(parent)
    return functions, inputs, parents
