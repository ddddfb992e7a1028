# SPDX-License-Identifier: Apache-2.0
"""One function of a graph as the engine sees it."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import nnabla as nn
import numpy as np
from numpy.typing import NDArray

from .function_kinds import OWN_REFERENCES, computes_in_half
from .matrix_products import GemmSlot, gemm_slots, product_matrices


class Scaling(NamedTuple):
    """A scalable input of one function.

    Attributes:
        layer: name of the layer.
        slot: which inputs of the function, and K.
        target: the input whose gradient is scaled.
        target_key: its key, as all keys the hash of the C++ variable.
        factor: the input that the output gradient is multiplied by: the weight.
        factor_key: its key.
        to_leaf: whether the target is a leaf, whose gradient is kept unscaled in an array of its own.
        half: whether the function reads the factor in half precision.
    """

    layer: str
    slot: GemmSlot
    target: nn.Variable
    target_key: int
    factor: nn.Variable
    factor_key: int
    to_leaf: bool
    half: bool

    def matrices(self, node: Node) -> Tuple[NDArray[Any], NDArray[Any]]:
        """Output gradient (N, C) and factor (C, M) of the layer's product, as they are now."""
        g, w = np.asarray(node.outputs[0].grad.data), np.asarray(self.factor.data.data)
        return product_matrices(node.type_name, node.args, self.slot, g, w)


class Node:
    """One function of the graph. Keys are the hashes of the C++ variables.

    Args:
        f: the function.
        label: its name.
        scalings: its inputs that get a scale.
        loss_section: whether it lies between the loss and the first layer.
        loss_exit: whether the gradient of that section leaves it here.
        non_homogeneous: whether its gradient is not proportional to the output gradient.
    """

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
        self,
        f: Any,
        label: str,
        scalings: Sequence[Scaling],
        *,
        loss_section: bool,
        loss_exit: bool,
        non_homogeneous: bool,
    ) -> None:
        inputs = f.inputs
        self.function_key: int = hash(f)
        self.type_name: str = f.info.type_name
        self.args: Mapping[str, Any] = f.info.args
        self.label = label
        self.outputs: List[nn.Variable] = f.outputs
        self.output_keys: List[int] = [hash(v) for v in self.outputs]
        differentiable = unique(v for v in inputs if v.need_grad)
        self.inputs = [v for v in differentiable if v.parent is not None]
        self.input_keys = [hash(v) for v in self.inputs]
        self.leaves = [v for v in differentiable if v.parent is None]
        self.leaf_keys = [hash(v) for v in self.leaves]
        self.scalings = scalings
        self.loss_section = loss_section
        self.loss_exit = loss_exit
        self.non_homogeneous = non_homogeneous
        self.in_place = self.type_name in OWN_REFERENCES
        self.half = computes_in_half(f.context)
        # A scalar gradient that is about to be spread over many elements (mean, sum, broadcast).
        self.expands = max((v.size for v in inputs), default=1) > 1
        self.single: Optional[int] = self.output_keys[0] if len(self.outputs) == 1 else None


def scalings_of(f: Any, label: str) -> List[Scaling]:
    """The inputs of `f` that can get a scale, whether a selection of layers has them or not."""
    inputs, half = f.inputs, computes_in_half(f.context)
    found = []
    for slot in gemm_slots(f.info.type_name, f.info.args, [v.shape for v in inputs], f.outputs[0].shape):
        target, factor = inputs[slot.input], inputs[slot.factor]
        # The same variable in both slots would be scaled in both roles: it gets no scale.
        if target.need_grad and hash(target) != hash(factor):
            name = label if slot.input == 0 else f"{label}:{slot.input}"
            keys = hash(target), hash(factor)
            found.append(Scaling(name, slot, target, keys[0], factor, keys[1], target.parent is None, half))
    return found


def unique(variables: Iterable[nn.Variable]) -> List[nn.Variable]:
    """Each C++ variable once, in the order of its first appearance."""
    seen: Dict[int, nn.Variable] = {}
    for v in variables:
        seen.setdefault(hash(v), v)
    return list(seen.values())
