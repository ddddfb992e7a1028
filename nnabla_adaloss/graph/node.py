# SPDX-License-Identifier: Apache-2.0
"""One function of a graph as the engine sees it."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import nnabla as nn
import numpy as np
from numpy.typing import NDArray

from .matrix_products import GemmSlot, product_matrices


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


class LayerSlot(NamedTuple):
    """A scalable input of one function; see `Scaling`. Variables go by position."""

    layer: str
    slot: GemmSlot
    target: int
    factor: int
    to_leaf: bool
    half: bool


class NodeStructure(NamedTuple):
    """One function that backward visits; see `Node`. Variables go by position.

    Attributes:
        separates: whether input gradients may carry another scale than the output gradient, with no layer.
        trivial: whether it passes one scale on, and nothing else is to be done.
        passes_on: whether an input that no layer scales gets a gradient, with the output gradient's scale.
        single: its output, where it has one only.
    """

    number: int
    type_name: str
    args: Mapping[str, Any]
    label: str
    outputs: Tuple[int, ...]
    inputs: Tuple[int, ...]
    leaves: Tuple[int, ...]
    slots: Tuple[LayerSlot, ...]
    loss_section: bool
    loss_exit: bool
    non_homogeneous: bool
    in_place: bool
    half: bool
    expands: bool
    separates: bool
    trivial: bool
    passes_on: bool
    single: Optional[int]


class Node:
    """One function of the graph. Keys are the hashes of the C++ variables.

    Args:
        known: what follows for it from how the graph is built.
        function_key: its key.
        variables: the variables of the graph, by position.
        keys: their keys.

    Attributes:
        structure: what follows for it from how the graph is built.
        number: which of the functions it is, in forward order.
        label: its name.
        scalings: its inputs that get a scale.
        inputs: those that need a gradient, but for leaves, each once.
        leaves: the leaves among them.
        loss_section: whether it lies between the loss and the first layer.
        loss_exit: whether the gradient of that section leaves it here.
        non_homogeneous: whether its gradient is not proportional to the output gradient.
        in_place: whether it keeps references of its own to arrays of its parameters.
        half: whether it computes in half precision.
        expands: whether one of its inputs has several elements.
        passes_on: whether an input but those of layers gets a gradient, with the output gradient's scale.
        single: the key of its output, where it has one only.
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
        "number",
        "output_keys",
        "outputs",
        "passes_on",
        "scalings",
        "single",
        "structure",
        "type_name",
    )

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
            Scaling(
                s.layer,
                s.slot,
                variables[s.target],
                keys[s.target],
                variables[s.factor],
                keys[s.factor],
                s.to_leaf,
                s.half,
            )
            for s in known.slots
        ]
        self.loss_section, self.loss_exit = known.loss_section, known.loss_exit
        self.non_homogeneous, self.in_place = known.non_homogeneous, known.in_place
        self.half, self.expands, self.passes_on = known.half, known.expands, known.passes_on
        self.single: Optional[int] = self.output_keys[0] if len(self.outputs) == 1 else None


def unique(variables: Iterable[nn.Variable]) -> List[nn.Variable]:
    """Each C++ variable once, in the order of its first appearance."""
    seen: Dict[int, nn.Variable] = {}
    for v in variables:
        seen.setdefault(hash(v), v)
    return list(seen.values())
