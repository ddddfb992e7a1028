# SPDX-License-Identifier: Apache-2.0
"""Functions that are matrix products, and their layouts.

Only a matrix product can have a scale of its own: its input gradient is `g` times the weight, so passing it
`alpha * weight` scales only the input gradient. The fan-in K is the number of products summed in one element
of that input gradient (Zhao et al. 2019, section 3.2).

The products are listed in `functions`.
"""

from __future__ import annotations

import math
from typing import Any, Callable, List, Mapping, NamedTuple, Sequence, Tuple

import numpy as np
from numpy.typing import NDArray

from ..core.components import ScaledInput

Shape = Tuple[int, ...]
Args = Mapping[str, Any]


def _input_of_all_weights(args: Args, inputs: Sequence[Shape], output: Shape) -> List[ScaledInput]:
    """The input x; each of its elements is multiplied by all weights of its channel."""
    k = float(math.prod(inputs[1][1:]))
    return [ScaledInput(0, 1, k, k)]


def input_of_convolution(args: Args, inputs: Sequence[Shape], output: Shape) -> List[ScaledInput]:
    """The input x; an element is multiplied by taps of (out, in/group, k...), depending on strides."""
    weight = inputs[1]
    kernel = weight[1:-1] if args["channel_last"] else weight[2:]
    return [ScaledInput(0, 1, *_strided(kernel, args["stride"], weight[0] // args["group"]))]


def input_of_depthwise_convolution(args: Args, inputs: Sequence[Shape], output: Shape) -> List[ScaledInput]:
    """The input x; an element is multiplied by taps of (in * multiplier, k...), depending on strides."""
    return [ScaledInput(0, 1, *_strided(inputs[1][1:], args["stride"], args["multiplier"]))]


def inputs_of_activations(args: Args, inputs: Sequence[Shape], output: Shape) -> List[ScaledInput]:
    """Both operands, each with the other as weight."""
    scaled_inputs = []
    for index, summed in ((0, output[-1]), (1, output[-2])):
        repeats = math.prod([o // i for o, i in zip(output[:-2], inputs[index][:-2])])
        k = float(summed * repeats)
        scaled_inputs.append(ScaledInput(index, 1 - index, k, k))
    return scaled_inputs


def _strided(kernel: Sequence[int], stride: Sequence[int], maps: int) -> Tuple[float, float]:
    # An input element meets k/stride kernel taps on average, at most the ceiling.
    mean = maps * math.prod(kernel) / math.prod(stride)
    bound = maps * math.prod([-(-k // s) for k, s in zip(kernel, stride)])
    return float(mean), float(bound)


def _channels(g: NDArray[Any], args: Args, scaled_input: ScaledInput) -> NDArray[Any]:
    moved = np.moveaxis(g, -1 if args.get("channel_last") else args["base_axis"], -1)
    return moved.reshape(-1, moved.shape[-1])


def summed_axis(g: NDArray[Any], args: Args, scaled_input: ScaledInput) -> NDArray[Any]:
    """Put the summed axis of a product of activations last."""
    moved = np.moveaxis(g, -1 if scaled_input.input == 0 else -2, -1)
    return moved.reshape(-1, moved.shape[-1])


def _rows(w: NDArray[Any], args: Args, scaled_input: ScaledInput) -> NDArray[Any]:
    """Weight of shape (out, ...)."""
    return w.reshape(w.shape[0], -1)


def rows_of_groups(w: NDArray[Any], args: Args, scaled_input: ScaledInput) -> NDArray[Any]:
    """Weight of shape (in, out/group, k...), by way of (out, in/group, k...)."""
    group = args["group"]
    split = w.reshape(group, w.shape[0] // group, w.shape[1], -1)
    return split.transpose(0, 2, 1, 3).reshape(group * w.shape[1], -1)


def shared_axis(w: NDArray[Any], args: Args, scaled_input: ScaledInput) -> NDArray[Any]:
    """Put the axis that the gradient shares first: of y = a b the columns of b, or the rows of a."""
    transposed = args["transpose_b" if scaled_input.input == 0 else "transpose_a"]
    is_last = (scaled_input.input == 0) != bool(transposed)
    moved = np.moveaxis(w, -1 if is_last else -2, 0)
    return moved.reshape(moved.shape[0], -1)


class Product(NamedTuple):
    """Layout of a product with a weight; by default C are the output channels."""

    # Inputs that can have a scale, from arguments, shapes of the inputs, and shape of the output.
    scaled_inputs: Callable[[Args, Sequence[Shape], Shape], List[ScaledInput]] = _input_of_all_weights
    # Output gradient as (N, C); weight, or other operand, as (C, M).
    gradient: Callable[[NDArray[Any], Args, ScaledInput], NDArray[Any]] = _channels
    weight: Callable[[NDArray[Any], Args, ScaledInput], NDArray[Any]] = _rows
    # True if it multiplies activations: a computed one is never swapped for a whole pass, as copies of all
    # would be in memory at once.
    of_activations: bool = False

    def matrices(
        self, g: NDArray[Any], w: NDArray[Any], args: Args, scaled_input: ScaledInput
    ) -> Tuple[NDArray[Any], NDArray[Any]]:
        """Reshape to output gradient (N, C) and weight (C, M)."""
        return self.gradient(g, args, scaled_input), self.weight(w, args, scaled_input)


UNSCALED = Product(lambda args, inputs, output: [])
"""Product without a scale of its own: its weight cannot be swapped."""
