# SPDX-License-Identifier: Apache-2.0
"""Which arrays of a graph are rounded, and when."""

from __future__ import annotations

from typing import Any, Dict, FrozenSet, List, NamedTuple, Sequence, Set, Tuple

import nnabla as nn

from ..core.layer_precisions import LayerPrecisions
from ..core.precision import NARROWEST_SCALAR, Precision
from ..graph.float_tail import float_tail as find_tail
from ..graph.reading import GraphDescription, GraphReading, read_graph
from .function_precisions import Names, function_precisions, variable_precisions
from .operands import ProductOperands, operands_of
from .rules import KEEPS_FP32, fp32_leaves, half_gradients, half_leaves, half_outputs

Keyed = List[Tuple[int, nn.Variable]]

_NO_OPERANDS = ProductOperands([], [])


class Rounding(NamedTuple):
    """What is rounded for one function.

    Attributes:
        outputs: its outputs, when it has run.
        gradients: its input gradients, when its backward has run.
        operands: what it reads, before it runs.
    """

    outputs: Keyed
    gradients: Keyed
    operands: ProductOperands


class RoundingPlan:
    """The roundings of every function of the graph behind `loss`, by function key.

    Args:
        loss: the loss.
        precisions: the formats of layers.
        names: tells the names of parameters, by variable key; it is asked where layers differ.
        float_tail: whether functions at the loss compute in float; see `graph/float_tail.py`.

    Attributes:
        roundings: what is rounded for each function, by key.
        leaves: the leaves that are rounded where they are read.
        of_variables: the precision of each variable, by key; empty where all layers have the same.

    Raises:
        ValueError: a function computes in half precision already, or a pattern decides about no layer.
    """

    def __init__(
        self, loss: nn.Variable, precisions: LayerPrecisions, names: Names, *, float_tail: bool
    ) -> None:
        reading = read_graph(loss)
        _refuse_half(reading.described)
        functions = reading.functions
        of_functions = function_precisions(reading, precisions, names)
        self._default = precisions.only or precisions.narrowest
        self._of: Dict[int, Precision] = dict(zip(map(hash, functions), of_functions))
        self.of_variables: Dict[int, Precision] = {}
        if precisions.only is None:
            self.of_variables = variable_precisions(reading, of_functions)
        tail = _tail(reading, of_functions) if float_tail else frozenset()
        self._in_float = {hash(functions[i]) for i in tail}
        self._read_in_half: Set[int] = set()
        if self._in_float:
            others = (f for f in functions if hash(f) not in self._in_float)
            self._read_in_half = {hash(v) for f in others for v in f.inputs}
        self.roundings: Dict[int, Rounding] = {hash(f): self.rounding_of(f) for f in functions}
        in_half = [f for f in functions if hash(f) not in self._in_float]
        in_fp32 = {
            hash(v) for f in in_half for v in self._others(f, fp32_leaves(f, casts_data=self._casts(f)))
        }
        halves = (v for f in in_half for v in self._others(f, half_leaves(f, casts_data=self._casts(f))))
        leaves = {hash(v): v for v in halves}
        # A leaf that is also read in fp32 stays as it is for both.
        self.leaves: Keyed = [(key, v) for key, v in leaves.items() if key not in in_fp32]
        self._watch = reading.watch

    @property
    def is_current(self) -> bool:
        """True while the graph is what it was: nothing rewired, no `need_grad` changed."""
        return not self._watch.changed

    def rounding_of(self, f: Any) -> Rounding:
        """What is rounded for `f`."""
        precision = self._of.get(hash(f), self._default)
        operands = operands_of(f, precision) if precision.operands_only else _NO_OPERANDS
        outputs, gradients = half_outputs(f), half_gradients(f)
        if hash(f) in self._in_float:
            # As of every function in float: what is read or written in half on the other side is half.
            outputs = [v for v in outputs if hash(v) in self._read_in_half]
            gradients = [v for v in gradients if v.parent is not None and self._is_half(v.parent)]
        return Rounding(_keyed(outputs), _keyed(gradients), operands)

    def _casts(self, f: Any) -> bool:
        # An attention mask of -10000 would be NaN in E4M3; no hardware casts it to that.
        return self._of[hash(f)].stored_data.bits >= NARROWEST_SCALAR

    def _is_half(self, f: Any) -> bool:
        return hash(f) not in self._in_float and f.info.type_name not in KEEPS_FP32

    def _others(self, f: Any, leaves: List[nn.Variable]) -> List[nn.Variable]:
        """Those of the leaves of `f` that are not its operands."""
        operands = {operand.key for operand in self.roundings[hash(f)].operands.forward}
        return [v for v in leaves if hash(v) not in operands]


def _tail(reading: GraphReading, of_functions: Sequence[Precision]) -> FrozenSet[int]:
    """The functions that compute in float, by index."""
    candidates: Dict[Precision, List[int]] = {}
    for index, precision in enumerate(of_functions):
        candidates.setdefault(precision, []).append(index)
    # A single element is stored in the format that constants are cast to.
    tails = [find_tail(reading, found, p.data_format(1)).functions for p, found in candidates.items()]
    return frozenset().union(*tails)


def _refuse_half(described: GraphDescription) -> None:
    for index in described.in_half[:1]:
        raise ValueError(
            f"storage: {described.type_names[index]} is computed in {described.backends[index][0]}, which "
            "stores half precision already; build the whole network in a float context, or leave storage out"
        )


def _keyed(variables: List[nn.Variable]) -> Keyed:
    return [(hash(v), v) for v in variables]
