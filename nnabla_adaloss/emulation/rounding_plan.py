# SPDX-License-Identifier: Apache-2.0
"""Plan of rounding: arrays that a half-precision GPU would store in half, when, and in which precision."""

from __future__ import annotations

from typing import Any, Callable, Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

import nnabla as nn

from ..core.precision import NARROWEST_SCALAR, LayerPrecisions, Precision, widest
from ..graph.float_tail import float_tail as find_tail
from ..graph.functions import is_matrix_product, known
from ..graph.graph import Graph
from ..graph.matrix_products import UNSCALED
from ..graph.names import function_names
from .operands import Operand, operands_of

Keyed = List[Tuple[int, nn.Variable]]

Names = Callable[[], Mapping[int, str]]
"""Tells the names of parameters, by variable key."""


class Rounding(NamedTuple):
    """Arrays that are rounded for one function."""

    outputs: Keyed  # when it has run
    gradients: Keyed  # of its inputs, when its backward has run
    reads: Sequence[Operand]  # as a matrix product, before it runs
    backward_reads: Sequence[Operand]  # before its backward runs


class RoundingPlan:
    """The roundings of every function of the graph behind `loss`, by function key.

    `names` is asked where layers differ. With `float_tail`, functions at the loss compute in float; see
    `graph/float_tail.py`. ValueError where a function computes in half already, or a pattern decides about no
    layer.
    """

    def __init__(
        self, loss: nn.Variable, precisions: LayerPrecisions, names: Names, *, float_tail: bool
    ) -> None:
        self.graph = graph = Graph(loss)
        described = graph.described
        for index in described.in_half[:1]:
            raise ValueError(
                f"storage: {described.type_names[index]} is computed in {described.backends[index][0]}, "
                "which stores half precision already; build the whole network in a float context, or leave "
                "storage out"
            )
        functions = graph.functions
        of_functions = _function_precisions(graph, precisions, names)
        self._default = precisions.only or precisions.narrowest
        self._of: Dict[int, Precision] = dict(zip(map(hash, functions), of_functions))
        # Empty where all layers have the same.
        self.of_variables: Dict[int, Precision] = {}
        if precisions.only is None:
            self.of_variables = _variable_precisions(graph, of_functions)
        self._in_float: Set[int] = set()
        for precision in dict.fromkeys(of_functions if float_tail else ()):
            candidates = [index for index, of_one in enumerate(of_functions) if of_one == precision]
            # A single element is stored in the format that constants are cast to.
            in_float, _ = find_tail(graph, candidates, precision.data_format(1))
            self._in_float.update(hash(functions[i]) for i in in_float)
        self._read_in_half: Set[int] = set()
        if self._in_float:
            others = (f for f in functions if hash(f) not in self._in_float)
            self._read_in_half = {hash(v) for f in others for v in f.inputs}
        self.roundings: Dict[int, Rounding] = {hash(f): self.rounding_of(f) for f in functions}
        half: Dict[int, nn.Variable] = {}
        in_fp32: Set[int] = set()
        for f, precision in zip(functions, of_functions):
            if hash(f) not in self._in_float:
                # An attention mask of -10000 would be NaN in E4M3; no hardware casts it to that.
                casts_data = precision.stored_data.bits >= NARROWEST_SCALAR
                operands = {operand.key for operand in self.roundings[hash(f)].reads}
                of_half, of_fp32 = leaves_of(f, casts_data=casts_data)
                half.update((hash(v), v) for v in of_half if hash(v) not in operands)
                in_fp32.update({*map(hash, of_fp32)} - operands)
        # A leaf that is also read in fp32 stays as it is for both.
        self.leaves: Keyed = [(key, v) for key, v in half.items() if key not in in_fp32]
        self._loss = hash(loss.parent), hash(loss)

    def rounded_gradients(self) -> FrozenSet[int]:
        """Keys of the variables whose gradients are stored in the format. That of the loss is one of them,
        unless it is computed in float: nothing rounds it, but no scale may be more than the format holds.
        """
        found = {key for rounding in self.roundings.values() for key, _ in rounding.gradients}
        function, loss = self._loss
        return frozenset(found if function in self._in_float else found | {loss})

    def rounding_of(self, f: Any) -> Rounding:
        """Arrays that are rounded for `f`."""
        precision = self._of.get(hash(f), self._default)
        reads, backward_reads = operands_of(f, precision) if precision.operands_only else ((), ())
        outputs, gradients = half_outputs(f), half_gradients(f)
        if hash(f) in self._in_float:
            # As of every function in float: what is read or written in half on the other side is half.
            outputs = [v for v in outputs if hash(v) in self._read_in_half]
            before = ((v, v.parent) for v in gradients if v.parent is not None)
            gradients = [v for v, g in before if hash(g) not in self._in_float and not _keeps_fp32(g)]
        return Rounding(
            [(hash(v), v) for v in outputs], [(hash(v), v) for v in gradients], reads, backward_reads
        )


def _function_precisions(graph: Graph, precisions: LayerPrecisions, names: Names) -> List[Precision]:
    """The precision of each function, in forward order: patterns match layers, which read a parameter or are
    products, and what comes before all layers. Others have the widest precision of the layers they follow.
    """
    if precisions.only is not None:
        return [precisions.only] * len(graph.functions)
    described = graph.description(graph.completed_names(names()))
    labels = function_names(described)
    # What each function hands on; None before all layers.
    followed: List[Optional[Precision]] = []
    found: List[Precision] = []
    matched: List[str] = []
    producers = described.inputs.by_function(described.producers)
    for index, positions in enumerate(described.inputs.by_function()):
        behind = [followed[producer] for producer in producers[index] if producer is not None]
        known = [precision for precision in behind if precision is not None]
        reads_parameter = not described.kept.keys().isdisjoint(positions)
        is_layer = reads_parameter or is_matrix_product(described.type_names[index])
        if known and not is_layer:
            own = widest(known)
        else:
            own = precisions.of(labels[index])
            matched.append(labels[index])
        found.append(own)
        followed.append(own if known or is_layer else None)
    precisions.check(matched)
    return found


def _variable_precisions(graph: Graph, of_functions: Sequence[Precision]) -> Dict[int, Precision]:
    """The precision of each variable, by key: its function's, or the widest of those that read a leaf."""
    described, keys = graph.described, graph.keys
    found: Dict[int, Precision] = {}
    for positions, precision in zip(described.outputs.by_function(), of_functions):
        found.update((keys[position], precision) for position in positions)
    readers: Dict[int, List[Precision]] = {}
    for positions, precision in zip(described.inputs.by_function(), of_functions):
        for position in positions:
            if position in graph.leaves:
                readers.setdefault(keys[position], []).append(precision)
    found.update((key, widest(precisions)) for key, precisions in readers.items())
    return found


def half_outputs(f: Any) -> List[nn.Variable]:
    """The outputs of `f` that are stored in half precision."""
    function = known(f.info.type_name)
    if function.keeps_fp32 or any(f.inplace_data(i) == 1 for i in range(len(f.inputs))):
        # An output that aliases its input was rounded with it, or is an fp32 master.
        return []
    outputs: List[nn.Variable] = f.outputs
    return outputs[:1] if function.writes_statistics else outputs


def leaves_of(f: Any, *, casts_data: bool = True) -> Tuple[List[nn.Variable], List[nn.Variable]]:
    """The leaves that `f` reads in half precision, such as weights and the data of matrix products, and those
    that it reads in fp32. `casts_data`: whether arithmetic casts data without gradient, such as masks.
    """
    function, inputs = known(f.info.type_name), f.inputs
    half: List[nn.Variable] = []
    # Functions with references of their own read weights through them: no swap reaches these.
    if not (function.keeps_fp32 or function.own_references):
        # Other leaves without a gradient may be labels or indices, which a half GPU keeps as they are.
        casts = function.product not in (None, UNSCALED) or (casts_data and function.casts_data)
        half = [v for v in function.in_half(inputs) if v.parent is None and (v.need_grad or casts)]
    keys = set(map(hash, half))
    return half, [v for v in inputs if v.parent is None and hash(v) not in keys]


def half_gradients(f: Any) -> List[nn.Variable]:
    """The inputs of `f` whose gradients are stored in half precision when `f` has run."""
    function = known(f.info.type_name)
    # Rounding an unscaled gradient would undo what scaling saved.
    if function.unscales:
        return []
    # A gradient is half when the function that writes it or the one that reads it is.
    found = [
        v
        for v in function.in_half(f.inputs)
        if v.need_grad and not (function.keeps_fp32 and (v.parent is None or _keeps_fp32(v.parent)))
    ]
    return list({hash(v): v for v in found}.values())


def _keeps_fp32(f: Any) -> bool:
    """Whether outputs of `f` stay fp32 until a half function reads them."""
    return known(f.info.type_name).keeps_fp32
