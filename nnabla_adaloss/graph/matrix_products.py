# SPDX-License-Identifier: Apache-2.0
"""Matrix products in disguise, and how they are laid out.

Only a matrix product can be given a scale of its own: its input gradient is `g` times the weight, so handing
it `alpha * weight` scales the input gradient and nothing else. The fan-in K is the number of products that
are added up in one element of that input gradient (Zhao et al. 2019, section 3.2).

Which functions are products, and how, is in `functions`.
"""

from __future__ import annotations

import math
from typing import Any, Callable, List, Mapping, NamedTuple, Sequence, Tuple

import numpy as np
from numpy.typing import NDArray

from ..core.components import GemmSlot

Shape = Tuple[int, ...]
Args = Mapping[str, Any]


# The inputs that can get a scale, of (args, shapes of inputs, shape of the output).


def _slot_of_all_weights(args: Args, inputs: Sequence[Shape], output: Shape) -> List[GemmSlot]:
    """One slot for x; each of its elements meets all weights of its channel."""
    k = float(math.prod(inputs[1][1:]))
    return [GemmSlot(0, 1, k, k)]


def slot_of_convolution(args: Args, inputs: Sequence[Shape], output: Shape) -> List[GemmSlot]:
    """One slot for x; strides decide which taps of (out, in/group, k...) an element meets."""
    weight = inputs[1]
    kernel = weight[1:-1] if args["channel_last"] else weight[2:]
    return [GemmSlot(0, 1, *_strided(kernel, args["stride"], weight[0] // args["group"]))]


def slot_of_depthwise_convolution(args: Args, inputs: Sequence[Shape], output: Shape) -> List[GemmSlot]:
    """One slot for x; strides decide which taps of (in * multiplier, k...) an element meets."""
    return [GemmSlot(0, 1, *_strided(inputs[1][1:], args["stride"], args["multiplier"]))]


def slots_of_activations(args: Args, inputs: Sequence[Shape], output: Shape) -> List[GemmSlot]:
    """A slot for each operand, with the other one."""
    slots = []
    for index, summed in ((0, output[-1]), (1, output[-2])):
        repeats = math.prod([o // i for o, i in zip(output[:-2], inputs[index][:-2])])
        k = float(summed * repeats)
        slots.append(GemmSlot(index, 1 - index, k, k))
    return slots


def _strided(kernel: Sequence[int], stride: Sequence[int], maps: int) -> Tuple[float, float]:
    # An input element meets k/stride kernel taps on average, and never more than the ceiling.
    mean = maps * math.prod(kernel) / math.prod(stride)
    bound = maps * math.prod([-(-k // s) for k, s in zip(kernel, stride)])
    return float(mean), float(bound)


# The output gradient as (N, C).


def _channels(g: NDArray[Any], args: Args, slot: GemmSlot) -> NDArray[Any]:
    moved = np.moveaxis(g, -1 if args.get("channel_last") else args["base_axis"], -1)
    return moved.reshape(-1, moved.shape[-1])


def summed_axis(g: NDArray[Any], args: Args, slot: GemmSlot) -> NDArray[Any]:
    """Of a product of activations, the axis that is summed over."""
    moved = np.moveaxis(g, -1 if slot.input == 0 else -2, -1)
    return moved.reshape(-1, moved.shape[-1])


# The weight, or other operand, as (C, M).


def _rows(w: NDArray[Any], args: Args, slot: GemmSlot) -> NDArray[Any]:
    """From (out, ...)."""
    return w.reshape(w.shape[0], -1)


def rows_of_groups(w: NDArray[Any], args: Args, slot: GemmSlot) -> NDArray[Any]:
    """From (in, out/group, k...) by way of (out, in/group, k...)."""
    group = args["group"]
    split = w.reshape(group, w.shape[0] // group, w.shape[1], -1)
    return split.transpose(0, 2, 1, 3).reshape(group * w.shape[1], -1)


def shared_axis(w: NDArray[Any], args: Args, slot: GemmSlot) -> NDArray[Any]:
    """Of the two last axes the one that the gradient shares: the columns of b, the rows of a."""
    transposed = args["transpose_b" if slot.input == 0 else "transpose_a"]
    shared = (slot.input == 0) != bool(transposed)
    moved = np.moveaxis(w, -1 if shared else -2, 0)
    return moved.reshape(moved.shape[0], -1)


class Product(NamedTuple):
    """How a product with a weight is laid out; most are as the defaults say, C being the output channels."""

    slots: Callable[[Args, Sequence[Shape], Shape], List[GemmSlot]] = _slot_of_all_weights
    gradient: Callable[[NDArray[Any], Args, GemmSlot], NDArray[Any]] = _channels
    factor: Callable[[NDArray[Any], Args, GemmSlot], NDArray[Any]] = _rows
    # Whether it multiplies activations by each other: a computed one is never swapped for a whole pass.
    of_activations: bool = False

    def matrices(
        self, g: NDArray[Any], w: NDArray[Any], args: Args, slot: GemmSlot
    ) -> Tuple[NDArray[Any], NDArray[Any]]:
        """Output gradient (N, C) and weight (C, M)."""
        return self.gradient(g, args, slot), self.factor(w, args, slot)


def _no_slots(args: Args, inputs: Sequence[Shape], output: Shape) -> List[GemmSlot]:
    return []


UNSCALED = Product(_no_slots)
"""A product that gets no scale of its own: the weight that it multiplies by cannot be swapped."""
