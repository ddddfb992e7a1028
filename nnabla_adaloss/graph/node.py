# SPDX-License-Identifier: Apache-2.0
"""One function of a graph as the engine sees it."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import nnabla as nn
import numpy as np
from numpy.typing import NDArray

from ..core.components import GemmSlot, NodeStructure
from .functions import known


class Scaling(NamedTuple):
    """A scalable input of one function; see `LayerSlot`."""

    layer: str
    gemm: GemmSlot
    target: nn.Variable
    target_key: int
    factor: nn.Variable
    factor_key: int
    half: bool

    def matrices(self, node: Node) -> Tuple[NDArray[Any], NDArray[Any]]:
        """Output gradient (N, C) and factor (C, M) of the layer's product, as they are now."""
        g, w = np.asarray(node.outputs[0].grad.data), np.asarray(self.factor.data.data)
        product = known(node.type_name).product
        assert product is not None, "only products have slots"
        return product.gradient(g, node.args, self.gemm), product.factor(w, node.args, self.gemm)


class Node:
    """One function of the graph; keys are the hashes of the C++ variables, found by position in `keys`."""

    def __init__(
        self, known: NodeStructure, function_key: int, variables: Sequence[nn.Variable], keys: Sequence[int]
    ) -> None:
        self.structure = known
        self.number, self.function_key = known.number, function_key
        self.type_name, self.args, self.label = known.type_name, known.args, known.label
        self.outputs: List[nn.Variable] = [variables[p] for p in known.outputs]
        self.output_keys: List[int] = [keys[p] for p in known.outputs]
        self.inputs = [variables[p] for p in known.inputs]
        self.input_keys = [keys[p] for p in known.inputs]
        self.leaves = [variables[p] for p in known.leaves]
        self.leaf_keys = [keys[p] for p in known.leaves]
        self.scalings = [
            Scaling(layer, slot, variables[target], keys[target], variables[factor], keys[factor], half)
            for layer, slot, target, factor, _, half in known.slots
        ]
        self.loss_section, self.non_homogeneous = known.loss_section, known.non_homogeneous
        self.own_references, self.half = known.own_references, known.half
        self.single: Optional[int] = self.output_keys[0] if len(self.outputs) == 1 else None
