# SPDX-License-Identifier: Apache-2.0
"""A layer's gradient and weight as the matrices of its product, for methods that look at elements."""

from __future__ import annotations

import math
from typing import Any, Mapping, NamedTuple

import nnabla as nn
import numpy as np
from numpy.typing import NDArray

from .gemm import GemmSlot


class Operand(NamedTuple):
    """An array of a layer, and which matrix of the layer's product it stands for.

    Attributes:
        array: The array.
        type_name: nnabla's type name of the layer's function.
        args: The function's arguments (``f.info.args``).
        slot: Which input is scaled.
        is_gradient: Whether ``array`` is the output gradient; else it is the weight.
        output_channels: Number of channels (or features) of the output.
    """

    array: nn.NdArray
    type_name: str
    args: Mapping[str, Any]
    slot: GemmSlot
    is_gradient: bool
    output_channels: int

    def matrix(self) -> NDArray[Any]:
        """Return the gradient as (N, C) or the weight as (C, M), with C the channels that are summed over.

        The input gradient is made of sums of products of an element of column c of the gradient with an
        element of row c of the weight. A batched product is taken for one large one: the matrices pair every
        batch element with every other.
        """
        values = np.asarray(self.array.data)
        return self._gradient(values) if self.is_gradient else self._factor(values)

    def _gradient(self, g: NDArray[Any]) -> NDArray[Any]:
        if self.type_name == "Affine":
            return g.reshape(-1, self.output_channels)
        if self.type_name == "BatchMatmul":
            axis = -1 if self.slot.input == 0 else -2
        else:
            axis = -1 if self.args.get("channel_last") else self.args["base_axis"]
        moved = np.moveaxis(g, axis, -1)
        return moved.reshape(-1, moved.shape[-1])

    def _factor(self, w: NDArray[Any]) -> NDArray[Any]:
        c = self.output_channels
        if self.type_name == "Affine":
            return w.reshape(w.shape[0], -1).T
        if self.type_name == "Deconvolution":
            # (in, out/group, ...) -> (out, in/group, ...)
            group = self.args["group"]
            split = w.reshape(group, w.shape[0] // group, c // group, -1)
            return split.transpose(0, 2, 1, 3).reshape(c, -1)
        if self.type_name == "BatchMatmul":
            # Of the two last axes the one that the gradient shares: the columns of b, the rows of a.
            transposed = self.args["transpose_b" if self.slot.input == 0 else "transpose_a"]
            shared = (self.slot.input == 0) != bool(transposed)
            moved = np.moveaxis(w, -1 if shared else -2, 0)
            return moved.reshape(moved.shape[0], -1)
        return w.reshape(c, -1)


def output_channels(type_name: str, args: Mapping[str, Any], slot: GemmSlot, output: Any, weight: Any) -> int:
    """Return the number of channels that the input gradient is summed over, from the shapes of both."""
    if type_name == "Affine":
        return int(math.prod(weight[1:]))
    if type_name == "BatchMatmul":
        return int(output[-1 if slot.input == 0 else -2])
    return int(output[-1 if args.get("channel_last") else args["base_axis"]])
