# SPDX-License-Identifier: Apache-2.0
"""Operands of matrix products: rounded copies, in the place of the arrays while a product runs."""

from __future__ import annotations

from collections import deque
from itertools import starmap
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import nnabla as nn

from ..core.formats import Format
from ..core.precision import Precision
from ..graph.functions import known
from ..kernels.scratch import ScratchPool
from .rounded_storage import RoundedStorage


class Operand(NamedTuple):
    """An array that a matrix product reads."""

    key: int  # of the variable
    variable: nn.Variable
    attribute: str  # "data" or "grad"
    holds_gradient: bool  # whether it is read in the format of gradients
    position: int  # tells the operands of one product apart
    is_leaf: bool  # whether it stays the same from forward to backward
    precision: Precision  # that of the product


def operands_of(f: Any, precision: Precision) -> Tuple[List[Operand], List[Operand]]:
    """Operands that `f` reads in forward and in backward; none unless it is a matrix product."""
    function, inputs = known(f.info.type_name), f.inputs
    if function.product is None:
        return [], []
    indices = range(len(inputs)) if function.operands is None else function.operands
    forward: Dict[int, Operand] = {}
    backward: Dict[int, Operand] = {}
    for i in indices:
        v = inputs[i]
        # A single element is not worth rounding.
        if v.size > 1:
            holds_gradient = i == 0 and function.multiplies_gradient
            operand = Operand(hash(v), v, "data", holds_gradient, i, v.parent is None, precision)
            forward[operand.key] = operand
            # Backward reads it for the gradients of its factors.
            if any(w.need_grad for other, w in enumerate(inputs) if other != i and other in {0, 1, *indices}):
                backward[operand.key] = operand
    outputs = [] if function.more_behind else [v for v in f.outputs if v.size > 1]
    gradients = [Operand(hash(v), v, "grad", True, i, False, precision) for i, v in enumerate(outputs)]
    return [*forward.values()], [*backward.values(), *gradients]


class OperandSwap:
    """Puts rounded copies in the place of a product's operands before it runs, and the arrays back after it.

    A leaf is rounded once in a forward pass, and used in backward as well, unless somebody has put another
    array in its place by then.
    """

    def __init__(self, storage: RoundedStorage, pool: ScratchPool) -> None:
        # What is to be put back, for `setattr`.
        self.swapped: List[Tuple[nn.Variable, str, nn.NdArray]] = []
        self._storage = storage
        self._pool = pool
        self._leaves: Dict[Tuple[int, Format], Tuple[nn.NdArray, nn.NdArray]] = {}

    def begin_forward(self) -> None:
        """Forget the leaves of the forward pass before."""
        self._leaves.clear()

    def swap(self, found: Sequence[Operand], *, remember: bool) -> None:
        """Put rounded copies in the place of arrays; `remember` keeps those of leaves for later products."""
        for operand in found:
            source = getattr(operand.variable, operand.attribute)
            rounded = self._rounded(operand, source, remember)
            if rounded is not None:
                # Noted before it is swapped: a signal may interrupt us between any two lines.
                self.swapped.append((operand.variable, operand.attribute, source))
                setattr(operand.variable, operand.attribute, rounded)

    def put_back(self) -> None:
        """Put the arrays back; harmless when none is away."""
        # One call into C that runs no line of Python: no signal can interrupt it halfway.
        deque(starmap(setattr, self.swapped), 0)
        self.swapped.clear()

    def _rounded(self, operand: Operand, source: nn.NdArray, remember: bool) -> Optional[nn.NdArray]:
        if source.clear_called:
            return None
        name, index, format = f"operand {operand.attribute}", operand.position, operand.precision.forward
        lasting = operand.is_leaf and not operand.holds_gradient
        if lasting:
            known = self._leaves.get((operand.key, format))
            if known is not None and known[0] == source:
                return known[1]
            if remember:
                name, index = f"operand of all products in {format.name}", operand.key
        target = self._pool.get(source.shape, name, index)
        rounding = self._storage.round_operand(
            source, target, operand.precision, holds_gradient=operand.holds_gradient
        )
        if rounding is None:
            return None
        if lasting and remember:
            self._storage.data[operand.key] = rounding
            self._leaves[operand.key, format] = source, target
        return target
