# SPDX-License-Identifier: Apache-2.0
"""What is known of a graph before backward runs: one node per function, in backward order."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from operator import attrgetter
from typing import Dict, List, Optional, Sequence, Set, Tuple

import nnabla as nn

from ..core.layer_selection import LayerSelection
from .functions import known
from .host_functions import HostFunction, host_functions
from .matrix_products import UNSCALED
from .names import ParameterNames, registered_names
from .node import Node
from .reading import GraphReading, read_graph
from .structure import GraphStructure, PlanOptions

_NAMELESS = 0, None
_shape = attrgetter("shape")


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
        structure: what of this follows from how the graph is built, and is the same for all alike.
        functions: all functions behind the loss, in forward order.
        all_variables: all variables behind it, by position.
        keys: their keys.
        layers: names of the layers that get a scale, in backward order.
        stopped: type names of the functions that backward does not visit.
        roots: the outputs that backward starts from.
        variables: all variables that get a gradient but are no leaves.
        variable_keys: their keys.
        kept_keys: keys of those whose gradients stay even when buffers are cleared.
        leaves: the leaves that get a gradient, by variable key.
        fixed_leaves: the leaves without, and whether forward writes them; of the others, those it writes.
        reading: the graph as it was read; notices when it is not what it was.

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
        reading = read_graph(loss)
        options = PlanOptions(selection, adaptive, frozenset(non_homogeneous))
        described = reading.description(completed_names(names, reading))
        self._bind(reading, GraphStructure(described, options, reading))

    @classmethod
    def bound(cls, reading: GraphReading, structure: GraphStructure) -> GraphPlan:
        """The plan of a graph whose structure is known: all but what asks for single functions is ready."""
        plan = cls.__new__(cls)
        plan._bind(reading, structure)
        return plan

    def _bind(self, reading: GraphReading, structure: GraphStructure) -> None:
        self.structure = structure
        self.functions = reading.functions
        self.all_variables, self.keys = variables, keys = reading.variables, reading.keys
        self.layers, self.stopped = structure.layers, structure.stopped
        self.roots = [variables[p] for p in structure.roots]
        self.variables = [variables[p] for p in structure.gradients]
        self.variable_keys = [keys[p] for p in structure.gradients]
        self.kept_keys = {keys[p] for p in structure.kept_gradients}
        self.leaves = {keys[p]: reading.leaves[p] for p in structure.leaves}
        self.fixed_leaves = [(reading.leaves[p], written) for p, written in structure.fixed.items()]
        self.reading = reading
        # A leaf without a name is no parameter: `reset_shape` gives it batches of another size.
        described = structure.described
        data = [p for p in reading.leaves if described.kept.get(p, _NAMELESS)[1] is None]
        self._data = [reading.leaves[p] for p in data]
        self._data_shapes = [described.shapes[p] for p in data]

    @property
    def reshaped(self) -> bool:
        """Whether data have another shape than they had."""
        return list(map(_shape, self._data)) != self._data_shapes

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


def completed_names(names: Optional[ParameterNames], reading: GraphReading) -> ParameterNames:
    """`names`, and those that nnabla has in the current scope if a leaf that needs a gradient has none."""
    if names is not None and all(reading.keys[position] in names for position in reading.needed):
        return names
    return {**registered_names(), **(names or {})}


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
    fan_in = ", ".join(f"{s.slot.fan_in:g}" for s in node.scalings)
    shape = ", ".join("x".join(map(str, s.factor.shape)) for s in node.scalings)
    layer = node.label if node.scalings or node.leaves else ""
    return node.type_name, role, layer, fan_in, shape
