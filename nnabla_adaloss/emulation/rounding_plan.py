# SPDX-License-Identifier: Apache-2.0
"""Which arrays of a graph are rounded, and when."""

from __future__ import annotations

from itertools import chain
from typing import Any, Dict, List, NamedTuple, Tuple

import nnabla as nn

from ..graph.node import unique
from ..graph.order import visited
from ..graph.watch import GraphWatch
from .operands import ProductOperands, operands_of
from .rules import fp32_leaves, half_gradients, half_leaves, half_outputs

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
        operands: whether the operands of matrix products are rounded by themselves.
    """

    def __init__(self, loss: nn.Variable, *, operands: bool) -> None:
        functions, inputs, _ = visited(loss)
        self._operands = operands
        self.roundings: Dict[int, Rounding] = {hash(f): self.rounding_of(f) for f in functions}
        in_fp32 = {hash(v) for f in functions for v in self._others(f, fp32_leaves(f))}
        leaves = {hash(v): v for f in functions for v in self._others(f, half_leaves(f))}
        # A leaf that is also read in fp32 stays as it is for both.
        self.leaves: Keyed = [(key, v) for key, v in leaves.items() if key not in in_fp32]
        self._watch = GraphWatch(unique([loss, *chain.from_iterable(inputs)]))

    @property
    def is_current(self) -> bool:
        """True while the graph is what it was: nothing rewired, no `need_grad` changed."""
        return not self._watch.changed

    def rounding_of(self, f: Any) -> Rounding:
        """What is rounded for `f`."""
        operands = operands_of(f) if self._operands else _NO_OPERANDS
        return Rounding(_keyed(half_outputs(f)), _keyed(half_gradients(f)), operands)

    def _others(self, f: Any, leaves: List[nn.Variable]) -> List[nn.Variable]:
        """Those of the leaves of `f` that are not its operands."""
        operands = {operand.key for operand in self.roundings[hash(f)].operands.forward}
        return [v for v in leaves if hash(v) not in operands]


def _keyed(variables: List[nn.Variable]) -> Keyed:
    return [(hash(v), v) for v in variables]
