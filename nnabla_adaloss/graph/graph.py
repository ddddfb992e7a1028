# SPDX-License-Identifier: Apache-2.0
"""Graph as read from nnabla: its functions and variables, and a check for changes."""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate, chain
from operator import attrgetter
from types import MappingProxyType
from typing import Dict, Iterable, List, Mapping, Optional

import nnabla as nn

from .description import GraphDescription, Uses, type_name_of, visited
from .names import ParameterNames, registered_names

_info, _type_name, _args = map(attrgetter, ("info", "type_name", "args"))
_context, _backend, _outputs = map(attrgetter, ("context", "backend", "outputs"))
_shape, _need_grad, _recompute = map(attrgetter, ("shape", "need_grad", "recompute"))


class Graph:
    """Present graph of `loss`; a `GraphPlan` has its roles, and refers to functions by number and to
    variables by position.

    Attributes:
        functions: all functions, in forward order: by number.
        variables: all variables, by position.
        keys: their keys, nnabla's hashes.
        leaves: the variables that no function computes, by position.
        needed: positions of the leaves that need a gradient.
        described: the graph by value, without the leaves that stay from graph to graph.
    """

    def __init__(self, loss: nn.Variable) -> None:
        # Each attribute is read once: nnabla makes a new object for each access.
        functions, inputs, parents = visited(loss)
        outputs = list(map(_outputs, functions))
        read, written = list(chain.from_iterable(inputs)), list(chain.from_iterable(outputs))
        read_keys, written_keys = list(map(hash, read)), list(map(hash, written))
        by_key = dict(zip(read_keys, read))
        # For a variable that is also read cut off from the graph, keep the object with its producer.
        by_key.update(zip(written_keys, written))
        position = dict(zip(by_key, range(len(by_key)))).__getitem__
        positions = list(map(position, read_keys))
        needs = list(map(_need_grad, read))
        producers = list(map(dict(zip(functions, range(len(functions)))).get, chain.from_iterable(parents)))
        infos = list(map(_info, functions))
        type_names = list(map(_type_name, infos))
        if not {str}.issuperset(map(type, type_names)):
            type_names = list(map(type_name_of, type_names))
        self.functions = functions
        self.variables, self.keys = list(by_key.values()), list(by_key)
        self.leaves = {p: v for p, v, producer in zip(positions, read, producers) if producer is None}
        self.needed = {p for p, need, f in zip(positions, needs, producers) if need and f is None}
        self.described = GraphDescription(
            type_names=type_names,
            args=list(map(_args, infos)),
            backends=list(map(_backend, map(_context, functions))),
            need_grads=list(map(_need_grad, functions)),
            inputs=Uses(list(accumulate(map(len, inputs))), positions),
            needs=needs,
            producers=producers,
            outputs=Uses(list(accumulate(map(len, outputs))), list(map(position, written_keys))),
            shapes=list(map(_shape, self.variables)),
            recomputed=list(map(_recompute, self.variables)),
            kept={},
        )
        self._written = written
        self._marked = self._marks()

    @property
    def rewired(self) -> bool:
        """True if a Variable refers to a different one than before, as after `Variable.rewire_on`."""
        return list(map(hash, self.variables)) != self.keys

    @property
    def marked_otherwise(self) -> bool:
        """True if `need_grad` or `recompute` of a variable has changed."""
        # `need_grad = ...` affects other variables after the next forward.
        return self._marks() != self._marked

    @property
    def is_current(self) -> bool:
        """True if the graph is unchanged since it was read, except for shapes, which change with forward."""
        return not (self.rewired or self.marked_otherwise)

    @property
    def reshaped(self) -> bool:
        """True if a variable has changed its shape."""
        return list(map(_shape, self.variables)) != self.described.shapes

    def _marks(self) -> List[bool]:
        return [*map(_need_grad, chain(self.variables, self.functions)), *map(_recompute, self._written)]

    def description(
        self, names: ParameterNames, one_gradient: Mapping[int, int] = MappingProxyType({})
    ) -> GraphDescription:
        """Describe the graph with names of parameters, and leaves that share a gradient array."""
        leaves = [(position, self.keys[position], names.get(self.keys[position])) for position in self.leaves]
        kept = {p: (key, name) for p, key, name in leaves if name is not None or p in self.needed}
        return self.described._replace(kept=kept, shared_gradients=one_gradient)

    def completed_names(self, names: Optional[ParameterNames] = None) -> ParameterNames:
        """Complete `names` by those of nnabla's current scope if a leaf with a gradient has no name."""
        if names is not None and all(self.keys[position] in names for position in self.needed):
            return names
        return {**registered_names(), **(names or {})}

    def by_key(self, positions: Iterable[int]) -> Dict[int, nn.Variable]:
        """Leaves at the given positions, by key."""
        return {self.keys[p]: self.leaves[p] for p in positions}

    @cached_property
    def positions(self) -> Dict[int, int]:
        """Position of each variable, by key."""
        return {key: position for position, key in enumerate(self.keys)}

    @cached_property
    def numbers(self) -> Dict[int, int]:
        """Number of each function, by key."""
        return {hash(f): number for number, f in enumerate(self.functions)}
