# SPDX-License-Identifier: Apache-2.0
"""What the engine knows of a graph before backward runs: one node per function, in backward order."""

from __future__ import annotations

import heapq
from fnmatch import fnmatchcase
from typing import Any, Dict, FrozenSet, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

import nnabla as nn

from .gemm import GemmSlot, gemm_slots
from .operands import Operand, output_channels

# Their gradient is not proportional to the output gradient: they clip it or ignore it.
NON_HOMOGENEOUS: FrozenSet[str] = frozenset({"ClipGradByNorm", "ClipGradByValue", "Sink"})

# They keep their own reference to the gradient arrays of their parameters, so swapping has no effect.
KEEPS_GRADIENT_ARRAYS: FrozenSet[str] = frozenset({"LSTM", "GRU", "RNN", "SpectralNorm"})


class Scaling(NamedTuple):
    """A scalable input of one function: the layer's name, K, the variables, and whether it is a leaf."""

    layer: str
    slot: GemmSlot
    target: nn.Variable
    target_key: int
    factor: nn.Variable
    factor_key: int
    to_leaf: bool

    def operand(self, node: Node, array: nn.NdArray, is_gradient: bool) -> Operand:
        """Return the output gradient or the factor as an operand of the layer's product."""
        shapes = node.outputs[0].shape, self.factor.shape
        channels = output_channels(node.type_name, node.args, self.slot, *shapes)
        return Operand(array, node.type_name, node.args, self.slot, is_gradient, channels)


class Node:
    """One function of the graph as the engine sees it. Keys are the hashes of the C++ variables."""

    __slots__ = (
        "args",
        "expands",
        "function_key",
        "half",
        "in_place",
        "input_keys",
        "inputs",
        "label",
        "leaf_keys",
        "leaves",
        "loss_exit",
        "loss_section",
        "non_homogeneous",
        "output_keys",
        "outputs",
        "scalings",
        "single",
        "type_name",
    )

    def __init__(
        self, f: Any, label: str, scalings: List[Scaling], *, loss_section: bool, non_homogeneous: bool
    ) -> None:
        inputs = f.inputs
        self.function_key: int = hash(f)
        self.type_name: str = f.info.type_name
        self.args: Mapping[str, Any] = f.info.args
        self.label = label
        self.outputs: List[nn.Variable] = f.outputs
        self.output_keys: List[int] = [hash(v) for v in self.outputs]
        differentiable = _unique(v for v in inputs if v.need_grad)
        self.inputs = [v for v in differentiable if v.parent is not None]
        self.input_keys = [hash(v) for v in self.inputs]
        self.leaves = [v for v in differentiable if v.parent is None]
        self.leaf_keys = [hash(v) for v in self.leaves]
        self.scalings = scalings
        self.loss_section = loss_section
        # Whether the section's gradient leaves it here, for the first layer.
        self.loss_exit = False
        self.non_homogeneous = non_homogeneous
        self.in_place = self.type_name in KEEPS_GRADIENT_ARRAYS
        self.half = is_half(f.context)
        # A scalar gradient that is about to be spread over many elements (mean, sum, broadcast).
        self.expands = max((v.size for v in inputs), default=1) > 1
        self.single: Optional[int] = self.output_keys[0] if len(self.outputs) == 1 else None


def _unique(variables: Iterable[nn.Variable]) -> List[nn.Variable]:
    seen: Dict[int, nn.Variable] = {}
    for v in variables:
        seen.setdefault(hash(v), v)
    return list(seen.values())


def is_half(context: nn.Context) -> bool:
    """Tell whether nnabla computes in a native half-precision type under ``context``."""
    first = context.backend[0] if context.backend else ""
    return bool(first.endswith((":half", ":mixed_half")))


def parameter_names() -> Dict[int, str]:
    """Return the full names of all registered parameters in the current scope, by variable key."""
    return {hash(v): name for name, v in nn.get_parameters(grad_only=False).items()}


class GraphPlan:
    """The functions of a graph that backward will visit, each with its role.

    Args:
        loss: The variable that backward starts from.
        include: Patterns of layer names that may be scaled.
        exclude: Patterns of layer names that may not, even when included.
        adaptive: False when no function between the loss and the first layer may be rescaled.
        non_homogeneous: Type names of further functions whose gradient is not linear in the
            output gradient.
    """

    def __init__(
        self,
        loss: nn.Variable,
        *,
        include: Sequence[str] = ("*",),
        exclude: Sequence[str] = (),
        adaptive: bool = True,
        non_homogeneous: Sequence[str] = (),
    ) -> None:
        self._include = tuple(include)
        self._exclude = tuple(exclude)
        self._non_homogeneous = NON_HOMOGENEOUS | frozenset(non_homogeneous)
        self._names = parameter_names()
        self._labels: Dict[str, int] = {}
        self.nodes: Dict[int, Node] = {}
        # Functions that pass one scale on and have nothing else to be done: their output and inputs.
        self.trivial: Dict[int, Tuple[int, List[int]]] = {}
        self._behind_layer: Set[int] = set()
        self._consumers: Dict[int, int] = {}
        self.stopped = _functions_without_gradient(loss)
        order = backward_order(loss)
        for f in order:
            self._add(f, adaptive)
        for node in self.nodes.values():
            parents = [self.nodes.get(hash(v.parent)) for v in node.inputs]
            node.loss_exit = node.loss_section and not any(p is not None and p.loss_section for p in parents)
        leaves = _unique(v for f in order for v in f.inputs if v.parent is None)
        self._watched: List[Tuple[nn.Variable, bool]] = [(v, v.need_grad) for v in leaves]
        self.roots = loss.parent.outputs
        self.variables = _unique(v for node in self.nodes.values() for v in node.outputs + node.inputs)
        self.variable_keys = [hash(v) for v in self.variables]
        # Sink keeps the gradients of its inputs even when buffers are cleared.
        self.kept_keys = {k for n in self.nodes.values() if n.type_name == "Sink" for k in n.input_keys}

    def is_current(self) -> bool:
        """Tell whether the leaves still need the same gradients as when the plan was made."""
        return all(variable.need_grad == need_grad for variable, need_grad in self._watched)

    def fan_out(self, node: Node) -> bool:
        """Tell whether an output of the function feeds several functions."""
        return any(self._consumers.get(key, 0) > 1 for key in node.output_keys)

    def _add(self, f: Any, adaptive: bool) -> None:
        type_name = f.info.type_name
        inputs = f.inputs
        label = self._label(inputs, type_name)
        scalings = self._scalings(f, inputs, label)
        behind = bool(scalings) or any(hash(v) in self._behind_layer for v in f.outputs)
        if behind:
            self._behind_layer.update(hash(v) for v in inputs)
        node = Node(
            f,
            label,
            scalings,
            loss_section=adaptive and not behind and len(f.outputs) == 1,
            non_homogeneous=type_name in self._non_homogeneous,
        )
        for key in node.input_keys:
            self._consumers[key] = self._consumers.get(key, 0) + 1
        self.nodes[node.function_key] = node
        plain = not (node.leaves or scalings or node.loss_section or node.non_homogeneous)
        if plain and node.single is not None:
            self.trivial[node.function_key] = node.single, node.input_keys

    def _scalings(self, f: Any, inputs: Sequence[nn.Variable], label: str) -> List[Scaling]:
        if not self._included(label):
            return []
        found = []
        shapes = [v.shape for v in inputs]
        for slot in gemm_slots(f.info.type_name, f.info.args, shapes, f.outputs[0].shape):
            target, factor = inputs[slot.input], inputs[slot.factor]
            # The same variable in both slots would be scaled in both roles: it gets no scale.
            if target.need_grad and hash(target) != hash(factor):
                name = label if slot.input == 0 else f"{label}:{slot.input}"
                found.append(
                    Scaling(name, slot, target, hash(target), factor, hash(factor), target.parent is None)
                )
        return found

    def _included(self, label: str) -> bool:
        return any(fnmatchcase(label, p) for p in self._include) and not any(
            fnmatchcase(label, p) for p in self._exclude
        )

    def _label(self, inputs: Sequence[nn.Variable], type_name: str) -> str:
        scope = next((s for s in (_scope(v, self._names) for v in inputs[1:]) if s), type_name)
        count = self._labels.get(scope, 0)
        self._labels[scope] = count + 1
        return scope if count == 0 else f"{scope}[{count}]"

    def __str__(self) -> str:
        rows = [("function", "role", "layer", "K", "W shape")]
        rows += [self._row(node) for node in self.nodes.values()]
        rows += [(name, "stop", "", "", "") for name in self.stopped]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])

    def _row(self, node: Node) -> Tuple[str, str, str, str, str]:
        if node.scalings:
            role = "scaled"
        elif node.loss_section:
            role = "passed through (loss)"
        else:
            role = "passed through"
        if self.fan_out(node):
            role += ", fan-out"
        fan_in = ", ".join(f"{s.slot.fan_in:g}" for s in node.scalings)
        shape = ", ".join("x".join(map(str, s.factor.shape)) for s in node.scalings)
        layer = node.label if node.scalings or node.leaves else ""
        return node.type_name, role, layer, fan_in, shape


def _scope(v: nn.Variable, names: Mapping[int, str]) -> str:
    # A weight may be computed (weight normalization, a cast): name it after the parameter behind it.
    while v.parent is not None and v.parent.inputs:
        v = v.parent.inputs[0]
    name = names.get(hash(v), "")
    return name.rsplit("/", 1)[0] if "/" in name else name


def backward_order(loss: nn.Variable) -> List[Any]:
    """Return the functions that backward from ``loss`` visits, in the order it visits them."""
    order: List[Any] = []
    seen: Set[int] = set()
    waiting: List[Tuple[int, int, Any]] = []

    def push(f: Any) -> None:
        if f is not None and f.need_grad and hash(f) not in seen:
            seen.add(hash(f))
            heapq.heappush(waiting, (-f.rank, len(seen), f))

    push(loss.parent)
    while waiting:
        f = heapq.heappop(waiting)[2]
        order.append(f)
        for v in f.inputs:
            if v.need_grad:
                push(v.parent)
    return order


def _functions_without_gradient(loss: nn.Variable) -> List[str]:
    names: List[str] = []
    loss.visit(lambda f: names.append(f.info.type_name) if not f.need_grad else None)
    return names
