# SPDX-License-Identifier: Apache-2.0
"""Largest numbers and gradients of a network over some batches."""

from __future__ import annotations

import math
from typing import Any, List, Sequence

import nnabla as nn

from ..graph.functions import is_matrix_product
from . import remedies
from .network import NORMALIZATIONS, Network
from .watching import Sight, largest

PRODUCTS = {"Mul2", "Div2"}


class Batches:
    """Largest magnitudes over some batches."""

    def __init__(self, network: Network, sights: Sequence[Sight]) -> None:
        self._network, self._sights = network, sights

    def largest(self, v: nn.Variable) -> float:
        """Largest magnitude of a variable; infinite if it is unknown."""
        known = (s.data.get(hash(v)) for s in self._sights)
        return max((math.inf if one is None else one.abs_max for one in known), default=math.inf)

    def gradient(self, positions: Sequence[int]) -> float:
        """Largest magnitude in gradients of variables; infinite if one is not finite."""
        return largest(s.gradients.get(k) for s in self._sights for k in self._network.keys(positions))

    def factors(self, f: Any) -> List[nn.Variable]:
        """Inputs that a function multiplies by."""
        kind, names = f.info.type_name, self._network.names
        if kind in NORMALIZATIONS:
            return [v for v in f.inputs if names.get(hash(v), "").endswith("gamma")]
        return f.inputs[:2] if kind in PRODUCTS or is_matrix_product(kind) else []

    def zero_factors(self, f: Any) -> List[nn.Variable]:
        """Inputs of zeros that a function multiplies by."""
        return [v for v in self.factors(f) if not self.largest(v)]

    def is_disjoint(self, f: Any) -> bool:
        """True for a product of 0 although neither factor is: a mask opens only places of zeros."""
        is_zero = remedies.is_a(f, "Mul2") and not self.largest(f.outputs[0])
        return is_zero and all(map(self.largest, f.inputs))

    def zero_origin(self, v: nn.Variable) -> nn.Variable:
        """Origin of zeros that are only repeated or reshaped."""
        while v.parent is not None:
            kind, read = v.parent.info.type_name, v.parent.inputs
            # A product with zeros is 0, if its bias is 0, too.
            if is_matrix_product(kind):
                read = self.zero_factors(v.parent)[:1]
            read = read[1:2] if kind == "Embed" else read
            if [self.largest(w) for w in read] != [0.0]:
                break
            v = read[0]
        return v
