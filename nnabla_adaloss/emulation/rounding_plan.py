# SPDX-License-Identifier: Apache-2.0
"""Rounding plan: arrays that a half-precision GPU would store in half, and when, and how."""

from __future__ import annotations

from typing import Any, Dict, FrozenSet, List, NamedTuple, Optional, Sequence, Set, Tuple

import nnabla as nn

from ..core.formats import Format
from ..core.precision import NARROWEST_SCALAR, LayerPrecisions, Precision, widest
from ..graph.description import may_depend
from ..graph.float_tail import float_tail as find_tail
from ..graph.functions import hands_memory_on, is_matrix_product, properties_of
from ..graph.graph import Graph
from ..graph.names import ParameterNames, function_names


class Operand(NamedTuple):
    """Array that a function reads as a rounded copy."""

    key: int  # of the variable
    variable: nn.Variable
    attribute: str  # "data" or "grad"
    position: int  # distinguishes the operands of a function
    precision: Precision  # that of the function
    fitted: bool  # scaled by a power of two of its own, as for a matrix product
    holds_gradient: bool  # read in the format of gradients
    lasting: bool = False  # unchanged from forward to backward: data of a leaf

    @property
    def format(self) -> Format:
        """Format in which the function reads it."""
        if self.holds_gradient:
            return self.precision.backward
        return self.precision.forward if self.fitted else self.precision.data_format(self.variable.size)


class Rounding(NamedTuple):
    """Arrays that are rounded for one function."""

    outputs: Sequence[nn.Variable]  # after it has run
    gradients: Sequence[nn.Variable]  # of its inputs, after its backward
    reads: Sequence[Operand]  # before it runs
    backward_reads: Sequence[Operand]  # before its backward runs


class RoundingPlan:
    """Roundings of all functions of a graph; ValueError for one in half, or a pattern without a layer."""

    def __init__(
        self, loss: nn.Variable, precisions: LayerPrecisions, names: ParameterNames, *, float_tail: bool
    ) -> None:
        self.graph = graph = Graph(loss)
        described = graph.described
        if described.in_half:
            first = described.in_half[0]
            raise ValueError(
                f"storage: {described.type_names[first]} is computed in {described.backends[first][0]}, "
                "which stores half precision already; build the whole network in a float context, or leave "
                "storage out"
            )
        functions = graph.functions
        of_functions = _function_precisions(graph, precisions, names)
        self._default = precisions.narrowest
        self._of: Dict[int, Precision] = dict(zip(map(hash, functions), of_functions))
        # Empty if all layers have the same precision.
        self.of_variables = {} if precisions.common else _variable_precisions(graph, of_functions)
        self._in_float: Set[int] = set()
        for precision in dict.fromkeys(of_functions if float_tail else ()):
            candidates = [index for index, of_one in enumerate(of_functions) if of_one == precision]
            # Scalars are stored in the format that constants are cast to.
            in_float, _ = find_tail(graph, candidates, precision.data_format(1))
            self._in_float.update(hash(functions[i]) for i in in_float)
        # Leaves that some function reads in float; outputs, also read cut off from the graph, are none.
        read_in_float = {graph.keys[position] for position in described.outputs.positions}
        # Variables that are already in the format when a function reads them.
        self._rounded = {graph.keys[position] for position in graph.leaves} - read_in_float
        self.roundings: Dict[int, Rounding] = {}
        read_in_half: Dict[int, nn.Variable] = {}
        for f in functions:
            inputs, halves = f.inputs, self._half_inputs(f)
            rounding = self.roundings[hash(f)] = self.rounding_of(f, halves)
            if not rounding.outputs and _is_view(f):
                if inputs[0].parent is not None and hash(inputs[0]) in self._rounded:
                    self._rounded.update(map(hash, f.outputs))
                continue
            self._rounded.update(map(hash, rounding.outputs))
            # Operands have copies of their own.
            operands = {operand.key for operand in rounding.reads}
            leaves = {hash(v) for v in inputs if v.parent is None} - operands
            in_half = {hash(v): v for v in halves if v.parent is None and hash(v) in leaves}
            read_in_half.update(in_half)
            read_in_float |= leaves - in_half.keys()
        # A leaf that is also read in float is rounded for each function that reads it in half.
        self.leaves = {key: v for key, v in read_in_half.items() if key not in read_in_float}
        in_both = read_in_half.keys() & read_in_float
        self._rounded -= in_both
        for f in functions if in_both else ():
            if not in_both.isdisjoint(map(hash, f.inputs)):
                self.roundings[hash(f)] = self.rounding_of(f)
        # Operands in forward and in backward, by function key.
        roundings = self.roundings.items()
        self.reads = {key: one.reads for key, one in roundings if one.reads}
        self.backward_reads = {key: one.backward_reads for key, one in roundings if one.backward_reads}
        self._loss = hash(loss.parent), hash(loss)

    def rounded_gradients(self) -> FrozenSet[int]:
        """Keys of the variables whose gradients are stored in the format."""
        keys = {hash(v) for rounding in self.roundings.values() for v in rounding.gradients}
        # The loss's gradient is never rounded, but its scale must fit the format.
        function, loss = self._loss
        return frozenset(keys if function in self._in_float else keys | {loss})

    def rounding_of(self, f: Any, halves: Optional[List[nn.Variable]] = None) -> Rounding:
        """Arrays that are rounded for `f`; `halves`: inputs that it reads in half, if listed already."""
        precision = self._of.get(hash(f), self._default)
        outputs, gradients = half_outputs(f), half_gradients(f)
        if hash(f) in self._in_float:
            # Gradients that leave the float tail are half; its outputs are rounded by readers in half.
            outputs, before = [], ((v, v.parent) for v in gradients if v.parent is not None)
            gradients = [v for v, g in before if hash(g) not in self._in_float and not _keeps_fp32(g)]
        halves = self._half_inputs(f) if halves is None else halves
        unrounded = [v for v in halves if hash(v) not in self._rounded]
        reads = operands_of(f, precision, unrounded) if unrounded or precision.operands_only else ((), ())
        return Rounding(outputs, gradients, *reads)

    def _half_inputs(self, f: Any) -> List[nn.Variable]:
        """Inputs that `f` reads in half precision."""
        if hash(f) in self._in_float:
            return []
        # An attention mask of -10000 would be NaN in E4M3; no hardware casts it to that.
        bits = self._of.get(hash(f), self._default).stored_data.bits
        return half_inputs(f, casts_data=bits >= NARROWEST_SCALAR)


def _function_precisions(graph: Graph, precisions: LayerPrecisions, names: ParameterNames) -> List[Precision]:
    """Precision of each function: by pattern up to the first layers and for layers, else that handed on."""
    if precisions.common is not None:
        return [precisions.common] * len(graph.functions)
    described = graph.description(graph.completed_names(names))
    labels = function_names(described)
    # Layers read a parameter (a leaf with a gradient or a name) or are products; others take the widest
    # precision that their producers hand on, which is None before all layers.
    followed: List[Optional[Precision]] = []
    result: List[Precision] = []
    matched: List[str] = []
    producers = described.inputs.by_function(described.producers)
    for index, positions in enumerate(described.inputs.by_function()):
        of_layers = list(filter(None, (followed[p] for p in producers[index] if p is not None)))
        reads_parameter = not described.kept.keys().isdisjoint(positions)
        is_layer = reads_parameter or is_matrix_product(described.type_names[index])
        if of_layers and not is_layer:
            own = widest(of_layers)
        else:
            own = precisions.of(labels[index])
            matched.append(labels[index])
        result.append(own)
        followed.append(own if of_layers or is_layer else None)
    precisions.check(matched)
    return result


def _variable_precisions(graph: Graph, of_functions: Sequence[Precision]) -> Dict[int, Precision]:
    """Precision of each variable, by key: its function's, or the widest of a leaf's readers."""
    written, read = graph.described.outputs.by_function(), graph.described.inputs.by_function()
    of_outputs = {p: [precision] for positions, precision in zip(written, of_functions) for p in positions}
    of_leaves: Dict[int, List[Precision]] = {}
    for positions, precision in zip(read, of_functions):
        for position in graph.leaves.keys() & positions:
            of_leaves.setdefault(position, []).append(precision)
    return {graph.keys[p]: widest(precisions) for p, precisions in {**of_outputs, **of_leaves}.items()}


def half_outputs(f: Any) -> List[nn.Variable]:
    """Outputs of `f` that are stored in half precision."""
    function = properties_of(f.info.type_name)
    # An output that aliases its input was rounded with it, or is an fp32 weight.
    if function.keeps_fp32 or _is_view(f):
        return []
    outputs: List[nn.Variable] = f.outputs
    return outputs[:1] if function.writes_statistics else outputs


def half_inputs(f: Any, *, casts_data: bool = True) -> List[nn.Variable]:
    """Inputs that `f` reads in half; with `casts_data`, arithmetic casts data without gradient, too."""
    function = properties_of(f.info.type_name)
    # Functions that hold references of their own would not read swapped arrays.
    if function.keeps_fp32 or function.own_references or _is_view(f):
        return []
    inputs = f.inputs
    # Inputs of other functions without gradient may be labels or indices, which are not cast.
    casts = function.product is not None or (casts_data and function.casts_data)
    # Writes to a copy would be lost.
    written = [inputs[i] for i in function.writes if i < len(inputs)]
    return [v for v in function.in_half(inputs) if v.need_grad or (casts and v not in written)]


def half_gradients(f: Any) -> List[nn.Variable]:
    """Inputs of `f` whose gradients are stored in half precision after its backward."""
    function = properties_of(f.info.type_name)
    # Rounding an unscaled gradient would lose the bits that scaling saved.
    if function.unscales:
        return []
    # Half if the function that writes the gradient or the one that reads it is.
    variables = [
        v
        for v in function.in_half(f.inputs)
        if v.need_grad and not (function.keeps_fp32 and (v.parent is None or _keeps_fp32(v.parent)))
    ]
    return list({hash(v): v for v in variables}.values())


def _keeps_fp32(f: Any) -> bool:
    """True if outputs of `f` stay fp32 until a half function reads them."""
    return properties_of(f.info.type_name).keeps_fp32


def _is_view(f: Any) -> bool:
    """True if the output of `f` shares the memory of its input, in whatever format."""
    return hands_memory_on(f.info.type_name, f.info.args)


def operands_of(
    f: Any, precision: Precision, unrounded: Sequence[nn.Variable] = ()
) -> Tuple[List[Operand], List[Operand]]:
    """List the operands of `f` in forward and backward: those of a matrix product, and `unrounded` inputs."""
    function, inputs = properties_of(f.info.type_name), f.inputs
    is_product = precision.operands_only and function.product is not None
    factors = range(len(inputs)) if function.operands is None else function.operands
    needs = [i for i, v in enumerate(inputs) if v.need_grad]
    forward: Dict[int, Operand] = {}
    backward: Dict[int, Operand] = {}
    for i, v in enumerate(inputs):
        # A scalar is not worth 8 bits.
        fitted = is_product and i in factors and v.size > 1
        if fitted or v in unrounded:
            holds_gradient = i == 0 and function.multiplies_gradient and fitted
            lasting = v.parent is None and not holds_gradient
            operand = Operand(hash(v), v, "data", i, precision, fitted, holds_gradient, lasting)
            operand = forward.setdefault(operand.key, operand)
            if function.reads_more or any(may_depend(f.grad_depends_input_data, of, i) for of in needs):
                backward[operand.key] = operand
    outputs = [v for v in f.outputs if v.size > 1] if is_product and not function.more_behind else []
    gradients = [
        Operand(hash(v), v, "grad", i, precision, fitted=True, holds_gradient=True)
        for i, v in enumerate(outputs)
    ]
    return [*forward.values()], [*backward.values(), *gradients]
