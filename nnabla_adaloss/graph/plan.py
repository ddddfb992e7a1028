# SPDX-License-Identifier: Apache-2.0
"""What is known of a graph before backward runs: one node per function, in backward order."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

import nnabla as nn

from ..core.layer_selection import LayerSelection
from .components import Components, components_of
from .function_kinds import NON_HOMOGENEOUS
from .matrix_products import is_matrix_product, is_scalable
from .names import ParameterNames, function_names, registered_names
from .names_before import function_names_before
from .node import Node, scalings_of, unique
from .order import backward_order, forward_order
from .watch import GraphWatch


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
        nodes: what is known of each function, by function key, in backward order.
        trivial: functions that pass one scale on and have nothing else to be done: the keys of their output,
            of their first input, and of the others.
        loss_exits: in how many places the gradient leaves the section between the loss and the first layers.
        layers: names of the layers that get a scale, in backward order.
        stopped: type names of the functions that backward does not visit.
        roots: the outputs that backward starts from.
        variables: all variables that get a gradient but are no leaves.
        variable_keys: their keys.
        measured_keys: these, and those of the weights of layers.
        kept_keys: keys of those whose gradients stay even when buffers are cleared.
        leaves: the leaves that get a gradient, by variable key.
        functions: all functions behind the loss, in forward order.
        labels: the name of each, by function key.
        names: the names of parameters, by variable key.

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
        order, functions = backward_order(loss), forward_order(loss)
        names = _completed(names, order)
        labels = function_names(functions, names)
        scalable = {hash(f): scalings_of(f, labels[hash(f)]) for f in order}
        selection.check([s.layer for scalings in scalable.values() for s in scalings])
        section = _loss_section(order) if adaptive else set()
        special = NON_HOMOGENEOUS | frozenset(non_homogeneous)
        self.nodes: Dict[int, Node] = {}
        for f in order:
            key, label = hash(f), labels[hash(f)]
            self.nodes[key] = Node(
                f,
                label,
                [s for s in scalable[key] if selection.selects(label, s.layer)],
                loss_section=key in section,
                loss_exit=key in section and not any(hash(p) in section for p in _parents(f)),
                non_homogeneous=f.info.type_name in special,
            )
        self.trivial = _trivial(self.nodes)
        self.loss_exits = sum(node.loss_exit for node in self.nodes.values())
        self.layers = [s.layer for node in self.nodes.values() for s in node.scalings]
        self.stopped = [f.info.type_name for f in functions if not f.need_grad]
        self.roots = loss.parent.outputs
        self.variables = unique(v for node in self.nodes.values() for v in node.outputs + node.inputs)
        self.variable_keys = [hash(v) for v in self.variables]
        factors = (s.factor_key for node in self.nodes.values() for s in node.scalings)
        self.measured_keys = list(dict.fromkeys([*self.variable_keys, *factors]))
        # Sink keeps the gradients of its inputs even when buffers are cleared.
        self.kept_keys = {k for n in self.nodes.values() if n.type_name == "Sink" for k in n.input_keys}
        self.leaves = {k: v for node in self.nodes.values() for k, v in zip(node.leaf_keys, node.leaves)}
        self.functions, self.labels, self.names = functions, labels, names
        self._order = order
        self._components: Dict[bool, Components] = {}
        self._watch = GraphWatch(unique([loss, *(v for f in order for v in f.inputs)]))

    @property
    def is_current(self) -> bool:
        """True while the graph is what it was: nothing rewired, no `need_grad` changed."""
        return not self._watch.changed

    @cached_property
    def readers(self) -> Dict[int, Set[int]]:
        """Keys of the functions that backward visits and that have a variable as input, by its key."""
        found: Dict[int, Set[int]] = {}
        for f in self._order:
            for v in f.inputs:
                found.setdefault(hash(v), set()).add(hash(f))
        return found

    def components(self, *, by_layer: bool) -> Components:
        """What functions that pass a scale on connect; see `components_of`."""
        if by_layer not in self._components:
            self._components[by_layer] = components_of(self.nodes.values(), by_layer=by_layer)
        return self._components[by_layer]

    def labels_before(self) -> Dict[str, str]:
        """What version 0.1 called each function; the name it has now by the one it had, in backward order."""
        before = function_names_before(self._order, self.names)
        return {before[key]: node.label for key, node in self.nodes.items()}

    def __str__(self) -> str:
        rows = [("function", "role", "layer", "K", "W shape")]
        readers: Dict[int, int] = {}
        for node in self.nodes.values():
            for key in node.input_keys:
                readers[key] = readers.get(key, 0) + 1
        for node in self.nodes.values():
            rows.append(_row(node, fan_out=any(readers.get(key, 0) > 1 for key in node.output_keys)))
        rows += [(name, "stop", "", "", "") for name in self.stopped]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _completed(names: Optional[ParameterNames], order: Sequence[Any]) -> ParameterNames:
    """`names`, and those that nnabla has in the current scope if a leaf that needs a gradient has none."""
    if names is not None and all(
        hash(v) in names for f in order for v in f.inputs if v.parent is None and v.need_grad
    ):
        return names
    return {**registered_names(), **(names or {})}


def _parents(f: Any) -> List[Any]:
    return [v.parent for v in f.inputs if v.need_grad and v.parent is not None]


def _loss_section(order: Sequence[Any]) -> Set[int]:
    """Keys of the functions between the loss and the first layers, which multiply by a weight.

    Without any layer it is no section that leads somewhere: only what handles scalars at the loss belongs to
    it.
    """
    section: Set[int] = set()
    behind: Set[int] = set()
    layers = False
    for f in order:
        product = is_matrix_product(f.info.type_name)
        layers |= product
        outputs = f.outputs
        if product or any(hash(v) in behind for v in outputs):
            behind.update(hash(v) for v in f.inputs)
        elif len(outputs) == 1:
            section.add(hash(f))
    if layers:
        return section
    return {hash(f) for f in order if hash(f) in section and f.outputs[0].size == 1}


def _trivial(nodes: Dict[int, Node]) -> Dict[int, Tuple[int, int, Tuple[int, ...]]]:
    found = {}
    for key, node in nodes.items():
        busy = node.leaves or node.scalings or node.loss_section or node.non_homogeneous
        if node.single is not None and node.input_keys and not busy:
            first, *others = node.input_keys
            found[key] = node.single, first, tuple(others)
    return found


def _row(node: Node, *, fan_out: bool) -> Tuple[str, str, str, str, str]:
    if node.scalings:
        role = "scaled"
    elif node.loss_section:
        role = "passed through (loss)"
    elif is_matrix_product(node.type_name) and not is_scalable(node.type_name):
        role = "passed through (no scale of its own)"
    else:
        role = "passed through"
    if fan_out:
        role += ", fan-out"
    fan_in = ", ".join(f"{s.slot.fan_in:g}" for s in node.scalings)
    shape = ", ".join("x".join(map(str, s.factor.shape)) for s in node.scalings)
    layer = node.label if node.scalings or node.leaves else ""
    return node.type_name, role, layer, fan_in, shape
