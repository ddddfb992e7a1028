# SPDX-License-Identifier: Apache-2.0
"""One function of a graph, as far as it decides about scales; variables go by position."""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple, Tuple


class GemmSlot(NamedTuple):
    """One input of a function whose gradient can be scaled, and the input that scales it."""

    input: int  # index of the input whose gradient is scaled
    factor: int  # index of the input that multiplies the output gradient (the weight)
    fan_in: float  # mean number of products in one element of the input gradient
    fan_in_bound: float  # the largest number in any element, for overflow bounds


class LayerSlot(NamedTuple):
    """A scalable input of one function; variables go by position."""

    layer: str
    slot: GemmSlot
    target: int  # the input whose gradient is scaled
    factor: int  # the input that the output gradient is multiplied by: the weight
    to_leaf: bool  # whether the target is a leaf, whose gradient is kept unscaled in an array of its own
    half: bool  # whether the function reads the factor in half precision


class NodeStructure(NamedTuple):
    """What of a `Node` follows from how the graph is built; variables go by position."""

    number: int  # in forward order
    type_name: str
    args: Mapping[str, Any]
    label: str
    outputs: Tuple[int, ...]
    inputs: Tuple[int, ...]  # those that need a gradient, but for leaves, each once
    leaves: Tuple[int, ...]  # the leaves among them
    slots: Tuple[LayerSlot, ...]
    loss_section: bool  # whether it lies between the loss and the first layer
    loss_exit: bool  # whether the gradient of that section leaves it here
    non_homogeneous: bool  # whether its gradient is not proportional to the output gradient
    in_place: bool  # whether it keeps references of its own to arrays of its parameters
    half: bool
    expands: bool  # whether one of its inputs has several elements
    separates: bool  # whether input gradients may carry another scale than the output's, with no layer
