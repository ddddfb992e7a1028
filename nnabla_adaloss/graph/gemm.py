# SPDX-License-Identifier: Apache-2.0
"""Which functions are matrix products in disguise, and how many products their input gradients sum.

Only a matrix product can be given a scale of its own: its input gradient is ``g`` times the weight, so
handing it ``alpha * weight`` scales the input gradient and nothing else. The fan-in K is the number of
products that are added up in one element of that input gradient (Zhao et al. 2019, section 3.2).
"""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Sequence, Tuple

Shape = Tuple[int, ...]


class GemmSlot(NamedTuple):
    """One input of a function whose gradient can be scaled, and the input that scales it.

    Attributes:
        input: Index of the input whose gradient is scaled.
        factor: Index of the input that multiplies the output gradient (the weight).
        fan_in: Mean number of products in one element of the input gradient.
        fan_in_bound: The largest number of products in any element, for overflow bounds.
    """

    input: int
    factor: int
    fan_in: float
    fan_in_bound: float


def _prod(values: Sequence[int]) -> int:
    return int(math.prod(values))


def _affine(args: Mapping[str, Any], inputs: Sequence[Shape], output: Shape) -> List[GemmSlot]:
    k = float(_prod(inputs[1][1:]))
    return [GemmSlot(0, 1, k, k)]


def _strided(kernel: Sequence[int], stride: Sequence[int], maps: int) -> Tuple[float, float]:
    # An input element meets k/stride kernel taps on average, and never more than the ceiling.
    mean = maps * _prod(kernel) / _prod(stride)
    bound = maps * _prod([-(-k // s) for k, s in zip(kernel, stride)])
    return float(mean), float(bound)


def _convolution(args: Mapping[str, Any], inputs: Sequence[Shape], output: Shape) -> List[GemmSlot]:
    weight = inputs[1]
    kernel = weight[1:-1] if args["channel_last"] else weight[2:]
    return [GemmSlot(0, 1, *_strided(kernel, args["stride"], weight[0] // args["group"]))]


def _deconvolution(args: Mapping[str, Any], inputs: Sequence[Shape], output: Shape) -> List[GemmSlot]:
    k = float(_prod(inputs[1][1:]))
    return [GemmSlot(0, 1, k, k)]


def _depthwise_convolution(args: Mapping[str, Any], inputs: Sequence[Shape], output: Shape) -> List[GemmSlot]:
    return [GemmSlot(0, 1, *_strided(inputs[1][1:], args["stride"], args["multiplier"]))]


def _batch_matmul(args: Mapping[str, Any], inputs: Sequence[Shape], output: Shape) -> List[GemmSlot]:
    slots = []
    for index, summed in ((0, output[-1]), (1, output[-2])):
        repeats = _prod([o // i for o, i in zip(output[:-2], inputs[index][:-2])])
        k = float(summed * repeats)
        slots.append(GemmSlot(index, 1 - index, k, k))
    return slots


_GEMM: Dict[str, Callable[[Mapping[str, Any], Sequence[Shape], Shape], List[GemmSlot]]] = {
    "Affine": _affine,
    "Convolution": _convolution,
    "FusedConvolution": _convolution,
    "Deconvolution": _deconvolution,
    "DepthwiseConvolution": _depthwise_convolution,
    "DepthwiseDeconvolution": _deconvolution,
    "BatchMatmul": _batch_matmul,
}


def gemm_slots(
    type_name: str, args: Mapping[str, Any], inputs: Sequence[Shape], output: Shape
) -> List[GemmSlot]:
    """Return the inputs of a function whose gradients can carry a scale of their own.

    Args:
        type_name: nnabla's type name of the function, such as ``"Convolution"``.
        args: The function's arguments as nnabla keeps them (``f.info.args``).
        inputs: The shapes of the inputs.
        output: The shape of the first output.

    Returns:
        One slot per scalable input; empty for a function that is not a matrix product.

    Example:
        >>> gemm_slots("Affine", {"base_axis": 1}, [(32, 100), (100, 10), (10,)], (32, 10))
        [GemmSlot(input=0, factor=1, fan_in=10.0, fan_in_bound=10.0)]
    """
    rule = _GEMM.get(type_name)
    return rule(args, inputs, output) if rule else []


def is_gemm(type_name: str) -> bool:
    """Tell whether a function of this type is a matrix product."""
    return type_name in _GEMM
