# SPDX-License-Identifier: Apache-2.0
"""A graph as it was read: its functions and variables, what they are for backward, and whether that holds."""

from __future__ import annotations

from collections import Counter
from copy import copy
from functools import cached_property
from itertools import accumulate, chain
from operator import attrgetter
from types import MappingProxyType
from typing import Dict, List, Mapping, Optional, Sequence, Set, Tuple

import nnabla as nn

from ..core.layer_selection import LayerSelection
from .description import GraphDescription, Uses, visited
from .functions import known
from .host_functions import HostFunction, host_functions
from .matrix_products import UNSCALED
from .names import ParameterNames, registered_names
from .node import Node
from .structure import GraphStructure, PlanOptions

_NAMELESS = 0, None
_info, _need_grad = attrgetter("info"), attrgetter("need_grad")
_type_name, _args = attrgetter("type_name"), attrgetter("args")
_context, _backend = attrgetter("context"), attrgetter("backend")
_outputs, _shape, _recompute = attrgetter("outputs"), attrgetter("shape"), attrgetter("recompute")


class GraphPlan:
    """The functions of a graph that backward will visit, each with its role; `print` it.

    Args:
        loss: the variable that backward starts from.
        selection: which layers get a scale.
        adaptive: False when no function between the loss and the first layer may be rescaled.
        non_homogeneous: type names of further functions whose gradient is not linear in the output gradient.
        names: names of parameters, by variable key; those of parameters that nnabla has in the current scope
            are added.

    Attributes:
        functions: all functions behind the loss, in forward order.
        all_variables: all variables behind it, by position.
        keys: their keys.
        all_leaves: those that nothing computes, by position.
        described: the graph in values, but for which leaves are kept.

    Raises:
        ValueError: a pattern of the selection matches no layer.
    """

    def __init__(
        self,
        loss: nn.Variable,
        selection: LayerSelection = LayerSelection(),  # noqa: B008  # immutable
        *,
        adaptive: bool = True,
        non_homogeneous: Sequence[str] = (),
        names: Optional[ParameterNames] = None,
    ) -> None:
        self._read(loss)
        options = PlanOptions(selection, adaptive, frozenset(non_homogeneous))
        described = self.description(self.completed_names(names))
        self.structure = GraphStructure(described, options, self.functions, self.all_leaves)

    @classmethod
    def read(cls, loss: nn.Variable) -> GraphPlan:
        """The graph behind `loss` without roles, which `with_roles` adds."""
        plan = cls.__new__(cls)
        plan._read(loss)
        return plan

    def with_roles(self, structure: GraphStructure) -> GraphPlan:
        """The same with roles that are known of a graph that was built alike."""
        plan = copy(self)
        plan.structure = structure
        return plan

    def _read(self, loss: nn.Variable) -> None:
        # Asked for no attribute twice: nnabla makes a new object for each answer.
        functions, inputs, parents = visited(loss)
        outputs = list(map(_outputs, functions))
        read, written = list(chain.from_iterable(inputs)), list(chain.from_iterable(outputs))
        read_keys, written_keys = list(map(hash, read)), list(map(hash, written))
        by_key = dict(zip(read_keys, read))
        # One that is read cut off from the graph is known better by what writes it.
        by_key.update(zip(written_keys, written))
        position = dict(zip(by_key, range(len(by_key)))).__getitem__
        positions = list(map(position, read_keys))
        needs = list(map(_need_grad, read))
        producers = list(map(dict(zip(functions, range(len(functions)))).get, chain.from_iterable(parents)))
        infos = list(map(_info, functions))
        self.functions = functions
        self.all_variables, self.keys = list(by_key.values()), list(by_key)
        self.all_leaves = {p: v for p, v, producer in zip(positions, read, producers) if producer is None}
        # Positions of the leaves that need a gradient.
        self.needed = {
            p for p, need, producer in zip(positions, needs, producers) if need and producer is None
        }
        self.described = GraphDescription(
            type_names=list(map(_type_name, infos)),
            args=list(map(_args, infos)),
            backends=list(map(_backend, map(_context, functions))),
            need_grads=list(map(_need_grad, functions)),
            inputs=Uses(list(accumulate(map(len, inputs))), positions),
            needs=needs,
            producers=producers,
            outputs=Uses(list(accumulate(map(len, outputs))), list(map(position, written_keys))),
            shapes=list(map(_shape, self.all_variables)),
            recomputed=list(map(_recompute, self.all_variables)),
            kept={},
        )
        self._written = written
        self._marked = self._marks()

    @property
    def rewired(self) -> bool:
        """Whether a Variable stands for another one than before, as after `Variable.rewire_on`."""
        return list(map(hash, self.all_variables)) != self.keys

    @property
    def marked_otherwise(self) -> bool:
        """Whether another variable needs a gradient or is computed again in backward than before. What
        follows from `need_grad = ...` nnabla finds out with the next forward.
        """
        return self._marks() != self._marked

    @property
    def reshaped(self) -> bool:
        """Whether data have another shape than they had."""
        data, shapes = self._data
        return list(map(_shape, data)) != shapes

    @property
    def is_current(self) -> bool:
        """Whether the graph is as it was read; shapes, which change with forward, are not looked at."""
        return not (self.rewired or self.marked_otherwise)

    def _marks(self) -> List[bool]:
        marked = chain(self.all_variables, self.functions)
        return [*map(_need_grad, marked), *map(_recompute, self._written)]

    @cached_property
    def _data(self) -> Tuple[List[nn.Variable], List[Tuple[int, ...]]]:
        # A leaf without a name is no parameter: `reset_shape` gives it batches of another size.
        described = self.structure.described
        data = [p for p in self.all_leaves if described.kept.get(p, _NAMELESS)[1] is None]
        return [self.all_leaves[p] for p in data], [described.shapes[p] for p in data]

    def description(
        self, names: ParameterNames, one_gradient: Mapping[int, int] = MappingProxyType({})
    ) -> GraphDescription:
        """All that roles follow from, with the names of parameters, and the leaves whose gradients are one
        array.
        """
        kept = {}
        for position in self.all_leaves:
            name = names.get(self.keys[position])
            if name is not None or position in self.needed:
                kept[position] = self.keys[position], name
        return self.described._replace(kept=kept, one_gradient=one_gradient)

    def completed_names(self, names: Optional[ParameterNames] = None) -> ParameterNames:
        """`names`, and what nnabla has in the current scope if a leaf that needs a gradient has none."""
        if names is not None and all(self.keys[position] in names for position in self.needed):
            return names
        return {**registered_names(), **(names or {})}

    @property
    def layers(self) -> List[str]:
        """Names of the layers that get a scale, in backward order."""
        return self.structure.layers

    @property
    def stopped(self) -> List[str]:
        """Type names of the functions that backward does not visit."""
        return self.structure.stopped

    @cached_property
    def roots(self) -> List[nn.Variable]:
        """The outputs that backward starts from."""
        return [self.all_variables[p] for p in self.structure.roots]

    @cached_property
    def variables(self) -> List[nn.Variable]:
        """All variables that get a gradient but are no leaves."""
        return [self.all_variables[p] for p in self.structure.gradients]

    @cached_property
    def leaves(self) -> Dict[int, nn.Variable]:
        """The leaves that get a gradient, by variable key."""
        return {self.keys[p]: self.all_leaves[p] for p in self.structure.leaves}

    @cached_property
    def fixed_leaves(self) -> List[Tuple[nn.Variable, bool]]:
        """The leaves without gradient, and whether forward writes them; of the others, those it writes."""
        return [(self.all_leaves[p], written) for p, written in self.structure.fixed.items()]

    @property
    def recomputes(self) -> bool:
        """Whether activations are computed again in backward, with the weights as they are then."""
        return any(self.structure.described.recomputed)

    @cached_property
    def function_keys(self) -> List[int]:
        """Keys of all functions, in forward order."""
        return list(map(hash, self.functions))

    @cached_property
    def positions(self) -> Dict[int, int]:
        """The position of each variable, by its key."""
        return {key: position for position, key in enumerate(self.keys)}

    @cached_property
    def nodes(self) -> Dict[int, Node]:
        """What is known of each function, by function key, in backward order."""
        keyed = ((self.function_keys[known.number], known) for known in self.structure.nodes)
        return {key: Node(known, key, self.all_variables, self.keys) for key, known in keyed}

    @cached_property
    def labels(self) -> Dict[int, str]:
        """The name of each function, by function key."""
        return dict(zip(self.function_keys, self.structure.labels))

    @cached_property
    def names(self) -> Dict[int, str]:
        """The names of the parameters in the graph, by variable key."""
        kept = self.structure.described.kept.values()
        return {key: name for key, name in kept if name is not None}

    @property
    def host_functions(self) -> List[HostFunction]:
        """On a GPU: the functions that run on the host, as nnabla has no CUDA implementation for them."""
        contexts = [f.context for f in self.functions]
        return host_functions(self.structure.described, contexts, self.structure.labels)

    @cached_property
    def readers(self) -> Dict[int, Set[int]]:
        """Keys of the functions that backward visits and that have a variable as input, by its key."""
        functions = self.function_keys
        return {
            self.keys[position]: {functions[index] for index in indices}
            for position, indices in self.structure.readers.items()
        }

    def __str__(self) -> str:
        rows = [("function", "role", "layer", "K", "W shape")]
        readers = Counter(key for node in self.nodes.values() for key in node.input_keys)
        for node in self.nodes.values():
            rows.append(_row(node, fan_out=any(readers[key] > 1 for key in node.output_keys)))
        rows += [(name, "stop", "", "", "") for name in self.stopped]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        on_host = ", ".join(map(str, self.host_functions))
        notes = ["", f"on the host, for want of a CUDA implementation: {on_host}"] if on_host else []
        return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:], *notes])


def _row(node: Node, *, fan_out: bool) -> Tuple[str, str, str, str, str]:
    if node.scalings:
        role = "scaled"
    elif node.loss_section:
        role = "passed through (loss)"
    elif known(node.type_name).product is UNSCALED:
        role = "passed through (no scale of its own)"
    else:
        role = "passed through"
    if fan_out:
        role += ", fan-out"
    fan_in = ", ".join(f"{s.gemm.fan_in:g}" for s in node.scalings)
    shape = ", ".join("x".join(map(str, s.factor.shape)) for s in node.scalings)
    layer = node.label if node.scalings or node.leaves else ""
    return node.type_name, role, layer, fan_in, shape
