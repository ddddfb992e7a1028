# SPDX-License-Identifier: Apache-2.0
"""A graph read once: its functions and variables, and a description in which two alike graphs are equal."""

from __future__ import annotations

from itertools import accumulate, chain
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

import nnabla as nn

_info, _need_grad = attrgetter("info"), attrgetter("need_grad")
_type_name, _args = attrgetter("type_name"), attrgetter("args")
_context, _backend = attrgetter("context"), attrgetter("backend")
_inputs, _outputs = attrgetter("inputs"), attrgetter("outputs")
_shape, _recompute, _parent = attrgetter("shape"), attrgetter("recompute"), attrgetter("parent")


def is_half(backends: Sequence[str]) -> bool:
    """Whether the first of the `backends` of a context is one of half precision."""
    return bool(backends) and backends[0].endswith((":half", ":mixed_half"))


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
    """All that plans ask of a graph, without any object of it: where two are equal, so are their plans.
    Functions are in forward order; variables go by position, in the order in which forward meets them.
    """

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

    @property
    def in_half(self) -> List[int]:
        """Indices of the functions that compute in half precision."""
        # Most graphs have a single context.
        half = {name for name in {backend[0] for backend in self.backends if backend} if is_half([name])}
        if not half:
            return []
        return [i for i, backend in enumerate(self.backends) if backend and backend[0] in half]


class GraphReading:
    """The functions and variables of a graph; notices when the graph is not as it was read any more.

    `Variable.rewire_on` and `need_grad = ...` change it, and with the next forward what follows from that.
    """

    def __init__(
        self,
        functions: List[Any],
        by_key: Mapping[int, nn.Variable],
        outputs: List[nn.Variable],
        leaves: Dict[int, nn.Variable],
        needed: Set[int],
        described: GraphDescription,
    ) -> None:
        self.functions = functions
        self.variables, self.keys = list(by_key.values()), list(by_key)
        self.leaves = leaves  # the variables that nothing computes, by position
        self.needed = needed  # positions of the leaves that need a gradient
        self.described = described  # but for which leaves are kept
        self._outputs = outputs
        self._marked = self._marks()

    @property
    def rewired(self) -> bool:
        """True when a Variable stands for another one than before."""
        return list(map(hash, self.variables)) != self.keys

    @property
    def marked_otherwise(self) -> bool:
        """True when another variable needs a gradient, or is computed again in backward."""
        return self._marks() != self._marked

    @property
    def is_current(self) -> bool:
        """True while the graph is as it was read; shapes, which change with forward, are not looked at."""
        return not (self.rewired or self.marked_otherwise)

    def reads(self, index: int, position: int) -> bool:
        """Whether backward of a function reads what one of its variables holds."""
        f, described = self.functions[index], self.described
        part = described.inputs.part(index)
        read = [i for i, p in enumerate(described.inputs.positions[part]) if p == position]
        written = described.outputs.positions[described.outputs.part(index)]
        kept = [o for o, p in enumerate(written) if p == position]
        wanted = [i for i, need in enumerate(described.needs[part]) if need]
        return any(
            any(_may(f.grad_depends_input_data, i, j) for j in read)
            or any(_may(f.grad_depends_output_data, i, o) for o in kept)
            for i in wanted
        )

    def depends(self, index: int, of: int, on: int) -> bool:
        """Whether the gradient of one input of a function depends on what another one holds."""
        return _may(self.functions[index].grad_depends_input_data, of, on)

    def description(
        self, names: Mapping[int, str], one_gradient: Mapping[int, int] = MappingProxyType({})
    ) -> GraphDescription:
        """All that plans ask of the graph, with the names of parameters by variable key, and the leaves whose
        gradients are one array.
        """
        kept = {}
        for position in self.leaves:
            name = names.get(self.keys[position])
            if name is not None or position in self.needed:
                kept[position] = self.keys[position], name
        return self.described._replace(kept=kept, one_gradient=one_gradient)

    def _marks(self) -> List[bool]:
        marked = chain(self.variables, self.functions)
        return [*map(_need_grad, marked), *map(_recompute, self._outputs)]


def _may(depends: Callable[[int, int], bool], of: int, on: int) -> bool:
    """Whether a gradient depends on an array, as nnabla tells; in a function that does not tell it may."""
    try:
        return depends(of, on)
    except (NotImplementedError, SystemError):
        return True


def visited(loss: nn.Variable) -> Tuple[List[Any], List[List[nn.Variable]], List[List[Any]]]:
    """The functions behind `loss` in forward order, their inputs, and the functions that compute these or
    None. `Variable.visit` would keep what it is called with, and so the graph, in a reference cycle.
    """
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


def read_graph(loss: nn.Variable) -> GraphReading:
    """The graph behind `loss`, asked for no attribute twice: nnabla makes a new object for each answer."""
    functions, inputs, parents = visited(loss)
    outputs = list(map(_outputs, functions))
    read, written = list(chain.from_iterable(inputs)), list(chain.from_iterable(outputs))
    read_keys, written_keys = list(map(hash, read)), list(map(hash, written))
    by_key = dict(zip(read_keys, read))
    # One that is read cut off from the graph is known better by what writes it.
    by_key.update(zip(written_keys, written))
    position = dict(zip(by_key, range(len(by_key)))).__getitem__
    read_positions = list(map(position, read_keys))
    needs = list(map(_need_grad, read))
    producers = list(map(dict(zip(functions, range(len(functions)))).get, chain.from_iterable(parents)))
    leaves = {p: v for p, v, producer in zip(read_positions, read, producers) if producer is None}
    needed = {p for p, need, producer in zip(read_positions, needs, producers) if need and producer is None}
    infos = list(map(_info, functions))
    described = GraphDescription(
        type_names=list(map(_type_name, infos)),
        args=list(map(_args, infos)),
        backends=list(map(_backend, map(_context, functions))),
        need_grads=list(map(_need_grad, functions)),
        inputs=Uses(list(accumulate(map(len, inputs))), read_positions),
        needs=needs,
        producers=producers,
        outputs=Uses(list(accumulate(map(len, outputs))), list(map(position, written_keys))),
        shapes=list(map(_shape, by_key.values())),
        recomputed=list(map(_recompute, by_key.values())),
        kept={},
    )
    return GraphReading(functions, by_key, written, leaves, needed, described)
