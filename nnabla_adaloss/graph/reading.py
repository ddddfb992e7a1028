# SPDX-License-Identifier: Apache-2.0
"""A graph read once: its functions and variables, and a description in which two alike graphs are equal."""

from __future__ import annotations

from itertools import accumulate, chain
from operator import attrgetter
from typing import Any, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

import nnabla as nn

from .function_kinds import is_half
from .order import visited

_info, _need_grad = attrgetter("info"), attrgetter("need_grad")
_type_name, _args = attrgetter("type_name"), attrgetter("args")
_context, _backend = attrgetter("context"), attrgetter("backend")
_inputs, _outputs = attrgetter("inputs"), attrgetter("outputs")
_shape, _recompute = attrgetter("shape"), attrgetter("recompute")


class Uses(NamedTuple):
    """What the functions of a graph read or write, one entry after the other for all of them.

    Attributes:
        ends: where those of each function end.
        positions: which variables they are.
    """

    ends: List[int]
    positions: List[int]

    def by_function(self) -> Iterator[slice]:
        """The part of each function."""
        return map(slice, [0, *self.ends], self.ends)


class GraphDescription(NamedTuple):
    """All that plans ask of a graph, without any object of it: where two are equal, so are their plans.

    Functions are in forward order. Variables go by position, in the order in which forward meets them.

    Attributes:
        type_names: of the functions, as nnabla calls them.
        args: their arguments.
        backends: what they are computed with.
        need_grads: whether backward visits them.
        inputs: what they read.
        needs: whether each of the inputs needs a gradient.
        producers: index of the function that each of the inputs comes from; None for leaves.
        outputs: what they write.
        shapes: of the variables.
        recomputed: whether what is in a variable is computed again in backward.
        kept: by position the key and the name of leaves that are the same in the next graph: those that need
            a gradient, and those that have a name.
    """

    type_names: List[str]
    args: List[Mapping[str, Any]]
    backends: List[List[str]]
    need_grads: List[bool]
    inputs: Uses
    needs: List[bool]
    producers: List[Optional[int]]
    outputs: Uses
    shapes: List[Tuple[int, ...]]
    recomputed: List[bool]
    kept: Dict[int, Tuple[int, Optional[str]]]

    @property
    def in_half(self) -> List[int]:
        """Indices of the functions that compute in half precision."""
        # Most graphs have a single context.
        half = {name for name in {backend[0] for backend in self.backends if backend} if is_half([name])}
        if not half:
            return []
        return [i for i, backend in enumerate(self.backends) if backend and backend[0] in half]


class GraphWatch:
    """Remembers which C++ variables some Variables stand for, and which need a gradient.

    `Variable.rewire_on` changes the former, a script that sets `need_grad` the latter, and with the next
    forward the functions and variables that follow. Also which of them are computed again in backward. To
    look whether a graph is rewired costs 0.04 µs per variable, for all changes 0.15.

    Args:
        variables: what is watched: the inputs of all functions, and the loss.
        outputs: those of them that functions compute.
        functions: functions, of which backward visits those that need a gradient.

    Example:
        >>> import nnabla as nn, nnabla.functions as F
        >>> x = nn.Variable((2,), need_grad=True)
        >>> watch = GraphWatch([x])
        >>> x.need_grad = False
        >>> watch.rewired, watch.changed
        (False, True)
    """

    def __init__(
        self,
        variables: Iterable[nn.Variable],
        outputs: Iterable[nn.Variable] = (),
        functions: Iterable[Any] = (),
    ) -> None:
        self._variables, self._outputs, self._functions = list(variables), list(outputs), list(functions)
        self._shaped: Sequence[nn.Variable] = ()
        self._shapes: List[Tuple[int, ...]] = []
        self._wired, self._marked = list(map(hash, self._variables)), self._marks()

    @property
    def rewired(self) -> bool:
        """True when a Variable stands for another one than before."""
        return list(map(hash, self._variables)) != self._wired

    @property
    def marked_otherwise(self) -> bool:
        """True when another variable needs a gradient, or is computed again in backward."""
        return self._marks() != self._marked

    def watch_shapes(self, variables: Sequence[nn.Variable], shapes: Sequence[Tuple[int, ...]]) -> None:
        """Notice, too, when one of these variables has another shape than this."""
        self._shaped, self._shapes = variables, list(shapes)

    @property
    def reshaped(self) -> bool:
        """True when a variable whose shape is watched has another one."""
        return list(map(_shape, self._shaped)) != self._shapes

    @property
    def changed(self) -> bool:
        """True when something but a shape is different from what it was."""
        return self.rewired or self.marked_otherwise

    def _marks(self) -> List[bool]:
        marked = chain(self._variables, self._functions)
        return [*map(_need_grad, marked), *map(_recompute, self._outputs)]


class GraphReading(NamedTuple):
    """The functions and variables of a graph.

    Attributes:
        functions: in forward order.
        variables: by position.
        keys: the key of each.
        leaves: those that nothing computes, by position.
        needed: positions of the leaves that need a gradient.
        described: all that plans ask of it, but of which leaves are kept.
        watch: notices when the graph is not what it was.
    """

    functions: List[Any]
    variables: List[nn.Variable]
    keys: List[int]
    leaves: Dict[int, nn.Variable]
    needed: Set[int]
    described: GraphDescription
    watch: GraphWatch

    @property
    def is_current(self) -> bool:
        """True while the graph is what it was when it was read.

        One that was rewired, or in which `need_grad` was set, is another after its next forward: only there
        nnabla finds out which of its functions and variables need a gradient. Shapes are not looked at:
        before forward those of a graph whose input has another one are neither the old nor the new.
        """
        return not self.watch.changed

    def description(self, names: Mapping[int, str]) -> GraphDescription:
        """All that plans ask of the graph.

        Args:
            names: names of parameters, by variable key.
        """
        kept = {}
        for position in self.leaves:
            key = self.keys[position]
            name = names.get(key)
            if name is not None or position in self.needed:
                kept[position] = key, name
        return self.described._replace(kept=kept)


def read_graph(loss: nn.Variable) -> GraphReading:
    """The graph behind `loss`, which some function computes.

    nnabla makes a new object for each attribute of a graph that is asked for: none is asked for twice.

    Example:
        >>> import nnabla.functions as F
        >>> x = nn.Variable((2, 3), need_grad=True)
        >>> read_graph(F.mean(F.tanh(x))).described.type_names
        ['Tanh', 'Mean']
    """
    functions, inputs, parents = visited(loss)
    outputs = list(map(_outputs, functions))
    read, written = list(chain.from_iterable(inputs)), list(chain.from_iterable(outputs))
    read_keys, written_keys = list(map(hash, read)), list(map(hash, written))
    by_key = dict(zip(read_keys, read))
    # One that is read cut off from the graph is known better by what writes it.
    by_key.update(zip(written_keys, written))
    position = dict(zip(by_key, range(len(by_key)))).__getitem__
    variables = list(by_key.values())
    read_positions = list(map(position, read_keys))
    needs = list(map(_need_grad, read))
    producers = list(map(dict(zip(functions, range(len(functions)))).get, chain.from_iterable(parents)))
    leaves = {p: v for p, v, producer in zip(read_positions, read, producers) if producer is None}
    needed = {p for p, need, producer in zip(read_positions, needs, producers) if need and producer is None}
    infos = list(map(_info, functions))
    described = GraphDescription(
        list(map(_type_name, infos)),
        list(map(_args, infos)),
        list(map(_backend, map(_context, functions))),
        list(map(_need_grad, functions)),
        Uses(list(accumulate(map(len, inputs))), read_positions),
        needs,
        producers,
        Uses(list(accumulate(map(len, outputs))), list(map(position, written_keys))),
        list(map(_shape, variables)),
        list(map(_recompute, variables)),
        {},
    )
    return GraphReading(
        functions,
        variables,
        list(by_key),
        leaves,
        needed,
        described,
        GraphWatch([loss, *variables], written, functions),
    )
