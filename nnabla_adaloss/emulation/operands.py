# SPDX-License-Identifier: Apache-2.0
"""Operands: rounded copies that replace arrays while the function that reads them runs."""

from __future__ import annotations

from collections import deque
from itertools import starmap
from typing import Any, Collection, Dict, List, NamedTuple, Optional, Sequence, Tuple

import nnabla as nn

from ..core.formats import Format
from ..core.precision import Precision
from ..graph.description import may_depend
from ..graph.functions import properties_of
from ..kernels.arrays import ScratchPool
from .rounded_storage import RoundedStorage


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
        """Format in which data is read."""
        return self.precision.forward if self.fitted else self.precision.data_format(self.variable.size)


def operands_of(
    f: Any, precision: Precision, unrounded: Collection[nn.Variable] = ()
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


class OperandSwap:
    """Replaces a function's operands by rounded copies before it runs, and restores the arrays after it."""

    # A leaf is rounded once in forward, and used in backward unless its array was replaced by then.

    def __init__(self, storage: RoundedStorage, pool: ScratchPool) -> None:
        # Arrays to restore, as arguments of `setattr`.
        self.swapped: List[Tuple[nn.Variable, str, nn.NdArray]] = []
        self._storage = storage
        self._pool = pool
        self._leaves: Dict[Tuple[int, Format], Tuple[nn.NdArray, nn.NdArray]] = {}

    def begin_forward(self) -> None:
        """Forget the leaves of the last forward pass."""
        self._leaves.clear()

    def swap(self, operands: Sequence[Operand], *, remember: bool) -> None:
        """Replace arrays by rounded copies; `remember` keeps those of leaves for later products."""
        for operand in operands:
            source = getattr(operand.variable, operand.attribute)
            rounded = self._rounded(operand, source, remember)
            if rounded is not None:
                # Noted before the swap: a signal may interrupt between any two lines.
                self.swapped.append((operand.variable, operand.attribute, source))
                setattr(operand.variable, operand.attribute, rounded)

    def put_back(self) -> None:
        """Restore the replaced arrays, if any."""
        # One call into C without a line of Python: no signal can interrupt it halfway.
        deque(starmap(setattr, self.swapped), 0)
        self.swapped.clear()

    def _rounded(self, operand: Operand, source: nn.NdArray, remember: bool) -> Optional[nn.NdArray]:
        """Rounded copy of an operand's array, new or remembered; None if it must not be rounded."""
        if source.clear_called:
            return None
        name, index, format = f"operand {operand.attribute}", operand.position, operand.format
        if operand.lasting:
            before, rounded = self._leaves.get((operand.key, format), (None, None))
            if before is not None and before == source:
                return rounded
            if remember:
                name, index = f"operand of all functions in {format.name}", operand.key
        target = self._pool.get(source.shape, name, index)
        rounding = self._storage.round_operand(
            source, target, operand.precision, holds_gradient=operand.holds_gradient, fitted=operand.fitted
        )
        if rounding is None:
            return None
        if remember and (operand.lasting or not operand.fitted):
            self._storage.data[operand.key] = rounding
        if remember and operand.lasting:
            self._leaves[operand.key, format] = source, target
        return target
