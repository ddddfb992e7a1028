# SPDX-License-Identifier: Apache-2.0
"""Table of nnabla's functions, one row each; a function without a row has the defaults.

Only a matrix product can have a scale of its own: its input gradient is `g` times the weight, so passing it
`alpha * weight` scales only the input gradient. The fan-in K is the number of products summed in one element
of that input gradient (Zhao et al. 2019, section 3.2).
"""

from __future__ import annotations

import math
from operator import itemgetter
from typing import Any, Callable, Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import nnabla as nn
import numpy as np
from numpy.typing import NDArray

from ..core.components import ScaledInput

Shape = Tuple[int, ...]
Args = Mapping[str, Any]
Array = NDArray[Any]


def _input_of_all_weights(args: Args, inputs: Sequence[Shape], output: Shape) -> List[ScaledInput]:
    """The input x; each of its elements is multiplied by all weights of its channel."""
    k = float(math.prod(inputs[1][1:]))
    return [ScaledInput(0, 1, k, k)]


def _input_of_convolution(args: Args, inputs: Sequence[Shape], output: Shape) -> List[ScaledInput]:
    """The input x; an element is multiplied by taps of (out, in/group, k...), depending on strides."""
    weight = inputs[1]
    kernel = weight[1:-1] if args["channel_last"] else weight[2:]
    return [ScaledInput(0, 1, *_strided(kernel, args["stride"], weight[0] // args["group"]))]


def _input_of_depthwise_convolution(args: Args, inputs: Sequence[Shape], output: Shape) -> List[ScaledInput]:
    """The input x; an element is multiplied by taps of (in * multiplier, k...), depending on strides."""
    return [ScaledInput(0, 1, *_strided(inputs[1][1:], args["stride"], args["multiplier"]))]


def _inputs_of_activations(args: Args, inputs: Sequence[Shape], output: Shape) -> List[ScaledInput]:
    """Both operands, each with the other as weight."""
    scaled_inputs = []
    for index, summed in ((0, output[-1]), (1, output[-2])):
        repeats = math.prod([o // i for o, i in zip(output[:-2], inputs[index][:-2])])
        k = float(summed * repeats)
        scaled_inputs.append(ScaledInput(index, 1 - index, k, k))
    return scaled_inputs


def _strided(kernel: Sequence[int], stride: Sequence[int], maps: int) -> Tuple[float, float]:
    """Fan-in and its bound: an input element meets k/stride kernel taps on average, at most the ceiling."""
    mean = maps * math.prod(kernel) / math.prod(stride)
    bound = maps * math.prod([-(-k // s) for k, s in zip(kernel, stride)])
    return float(mean), float(bound)


def _channels(g: Array, args: Args, scaled_input: ScaledInput) -> Array:
    """Put the output channels last."""
    moved = np.moveaxis(g, -1 if args.get("channel_last") else args["base_axis"], -1)
    return moved.reshape(-1, moved.shape[-1])


def _summed_axis(g: Array, args: Args, scaled_input: ScaledInput) -> Array:
    """Put the summed axis of a product of activations last."""
    moved = np.moveaxis(g, -1 if scaled_input.input == 0 else -2, -1)
    return moved.reshape(-1, moved.shape[-1])


def _rows(w: Array, args: Args, scaled_input: ScaledInput) -> Array:
    """Weight of shape (out, ...)."""
    return w.reshape(w.shape[0], -1)


def _rows_of_groups(w: Array, args: Args, scaled_input: ScaledInput) -> Array:
    """Weight of shape (in, out/group, k...), by way of (out, in/group, k...)."""
    group = args["group"]
    split = w.reshape(group, w.shape[0] // group, w.shape[1], -1)
    return split.transpose(0, 2, 1, 3).reshape(group * w.shape[1], -1)


def _shared_axis(w: Array, args: Args, scaled_input: ScaledInput) -> Array:
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
    gradient: Callable[[Array, Args, ScaledInput], Array] = _channels
    weight: Callable[[Array, Args, ScaledInput], Array] = _rows

    def matrices(self, g: Array, w: Array, args: Args, scaled_input: ScaledInput) -> Tuple[Array, Array]:
        """Reshape to output gradient (N, C) and weight (C, M)."""
        return self.gradient(g, args, scaled_input), self.weight(w, args, scaled_input)


UNSCALED = Product(lambda args, inputs, output: [])
"""Product without a scale of its own: its weight cannot be swapped."""


class Derivative(NamedTuple):
    """Derivative of a scalar function by one of its inputs, for loss weights."""

    # Called with the function's arguments, the size of that input, and the values at `reads`.
    of: Callable[..., complex]
    # Indices of inputs; -1: the output.
    reads: Tuple[int, ...] = ()
    # The function's degree in that input, from its arguments: exponent of the factors of functions that
    # backward reaches later, if the values cannot be read.
    degree: Callable[[Args], float] = lambda args: 1.0


class Function(NamedTuple):
    """Properties of a function of nnabla."""

    # Product with a weight: how its input gradient is scaled, or that it cannot be.
    product: Optional[Product] = None
    # True if it multiplies activations: a computed one is never swapped for a whole pass, as copies of all
    # would be in memory at once.
    of_activations: bool = False
    # True if it keeps references to its parameters' arrays, so that swapping has no effect.
    own_references: bool = False
    # True if its gradient is proportional to the output gradient: neither clipped nor ignored.
    linear: bool = True
    # True if an input gradient of the same size has at most the output gradient's amax.
    never_enlarges: bool = False
    # Derivative at the loss, by input; missing or data-dependent ones count as 1.
    derivatives: Tuple[Derivative, ...] = ()
    # True if the gradients of its inputs stay when backward clears buffers.
    keeps_gradients: bool = False
    # True for this package's functions that scale gradients, or leave an unscaled fp32 gradient in a leaf.
    scales: bool = False
    unscales: bool = False
    # True if backward reads more than `Function.grad_depends_input_data` reports.
    reads_more: bool = False
    # Inputs that forward or backward writes, unless `batch_stat` or `update_running_mean` is false.
    writes: FrozenSet[int] = frozenset()
    # True if its output shares its input's memory, unless its argument `inplace` is false.
    hands_memory_on: bool = False
    # True if it never accesses arrays on the host, because others do all its work.
    moves_nothing: bool = False
    # In half precision: True if it computes and writes in fp32; if all outputs except the first are fp32; if
    # it casts all data that it reads; if it multiplies by the ratio of output to input size, cast to the type
    # of its arrays. And the inputs that it reads in half precision.
    keeps_fp32: bool = False
    writes_statistics: bool = False
    casts_data: bool = False
    averages: bool = False
    in_half: Callable[[Sequence[nn.Variable]], Sequence[nn.Variable]] = list
    # In 8 bits: inputs that a product multiplies (None: all); True if the first is an output gradient; True
    # if other operations lie between its output's gradient and the product.
    operands: Optional[Tuple[int, ...]] = (0, 1)
    multiplies_gradient: bool = False
    more_behind: bool = False


def _scalar(*derivatives: Derivative) -> Function:
    return Function(derivatives=derivatives, casts_data=True)


ONE = Derivative(lambda args, size: 1.0)

# Rows by type names.
_ROWS: Dict[str, Function] = {
    # Products with a scale of their own.
    "Affine": Function(
        Product(
            gradient=lambda g, args, scaled_input: g.reshape(math.prod(g.shape[: args["base_axis"]]), -1),
            weight=lambda w, args, scaled_input: w.reshape(w.shape[0], -1).T,  # from (in, out...)
        )
    ),
    "Convolution": Function(Product(_input_of_convolution)),
    "Deconvolution": Function(Product(weight=_rows_of_groups)),
    "DepthwiseConvolution": Function(Product(_input_of_depthwise_convolution)),
    "DepthwiseDeconvolution": Function(
        Product(weight=lambda w, args, scaled_input: w.reshape(w.shape[0] // args["divisor"], -1))
    ),  # from (in, k...)
    # Treated as one large product: its matrices pair every batch element with every other.
    "BatchMatmul": Function(Product(_inputs_of_activations, _summed_axis, _shared_axis), of_activations=True),
    # Products without a scale: the weight is a gradient or activation that others read, too.
    "AdaptiveSeparableConvolution": Function(UNSCALED, operands=(0, 1, 2)),
    "DeformableConvolution PatchCorrelation": Function(UNSCALED),
    # It keeps references to its inputs and ignores a swapped copy.
    "Einsum": Function(UNSCALED, operands=None),
    # It multiplies by its weight again within backward, under `nn.recompute()`. Inputs are x, weight, and
    # either a bias or batch normalization's parameters.
    "FusedConvolution": Function(
        UNSCALED,
        writes=frozenset({4, 5}),
        moves_nothing=True,
        in_half=lambda inputs: [*inputs[:2], *(v for v in inputs[2:3] if v.ndim == 1)],
        more_behind=True,
    ),
    # They quantize their weight themselves.
    "BinaryConnectAffine BinaryConnectConvolution": Function(
        UNSCALED, reads_more=True, writes=frozenset({2}), operands=(0,)
    ),
    "BinaryWeightAffine BinaryWeightConvolution": Function(UNSCALED, writes=frozenset({2, 3}), operands=(0,)),
    "INQAffine INQConvolution": Function(UNSCALED, writes=frozenset({1, 2}), operands=(0,)),
    "LSTM GRU RNN": Function(UNSCALED, own_references=True, operands=(), more_behind=True),
    "SpectralNorm": Function(own_references=True, writes=frozenset({1})),
    # Functions that nn.grad creates for layers.
    "AffineDataGrad AffineFilterGrad ConvolutionDataGrad ConvolutionFilterGrad DeconvolutionDataGrad "
    "DeconvolutionFilterGrad": Function(UNSCALED, multiplies_gradient=True),
    # Clipping of gradients.
    "ClipGradByNorm ClipGradByValue": Function(linear=False),
    "Sink": Function(linear=False, keeps_gradients=True, moves_nothing=True),
    # Backward writes the output gradient into its second input, for the user to read.
    "VATNoise": Function(linear=False, writes=frozenset({1}), casts_data=True),
    "Identity Transpose": Function(never_enlarges=True),
    "Reshape": Function(never_enlarges=True, hands_memory_on=True),
    "Add2 Sub2 ReLU Sigmoid Tanh": Function(never_enlarges=True, casts_data=True),
    # Normalization and quantization. Batch normalization reads x, beta, gamma, mean, variance, and if fused a
    # residual input: all except x and the last are fp32.
    "BatchNormalization FusedBatchNormalization SyncBatchNormalization": Function(
        writes=frozenset({3, 4}),
        writes_statistics=True,
        casts_data=True,
        in_half=lambda inputs: [inputs[0], *inputs[5:]],
    ),
    "MeanSubtraction MinMaxQuantize": Function(writes=frozenset({1, 2}), casts_data=True),
    "QuantizeLinear": Function(writes=frozenset({2}), casts_data=True),
    # Arithmetic, comparisons, activations, reductions.
    "AddN BcAdd2 MulN Pow2 Maximum2 Minimum2 AbsoluteError HuberLoss EpsilonInsensitiveLoss AddScalar "
    "RSubScalar MaximumScalar MinimumScalar Abs Erf Sin Cos Tan Sinh Cosh ASin ACos ATan ATan2 ASinh ACosh "
    "ATanh Sort TopKData TopKGrad Equal NotEqual Greater GreaterEqual Less LessEqual EqualScalar "
    "NotEqualScalar GreaterScalar GreaterEqualScalar LessScalar LessEqualScalar LeakyReLU ReLU6 CReLU ELU "
    "CELU SELU GELU Swish Mish SoftPlus SoftSign LogSigmoid HardSigmoid HardTanh LayerNormalization "
    "InstanceNormalization GroupNormalization": Function(casts_data=True),
    "Mean": Function(averages=True, casts_data=True),
    "MulScalar": _scalar(Derivative(lambda args, size: args["val"])),
    # The sum has as many terms as elements.
    "Sum": _scalar(Derivative(lambda args, size: size)),
    "Mul2": _scalar(Derivative(lambda args, size, b: b, (1,)), Derivative(lambda args, size, a: a, (0,))),
    "Div2": _scalar(
        Derivative(lambda args, size, b: 1.0 / b, (1,)),
        Derivative(lambda args, size, a, b: -a / b / b, (0, 1), lambda args: -1.0),
    ),
    "RDivScalar": _scalar(Derivative(lambda args, size, x: -args["val"] / x / x, (0,), lambda args: -1.0)),
    "PowScalar": _scalar(
        Derivative(lambda args, size, x: args["val"] * x ** (args["val"] - 1.0), (0,), itemgetter("val"))
    ),
    "RPowScalar": _scalar(Derivative(lambda args, size, y: math.log(args["val"]) * y, (-1,))),
    "Exp": _scalar(Derivative(lambda args, size, y: y, (-1,))),
    "Log": _scalar(Derivative(lambda args, size, x: 1.0 / x, (0,), lambda args: 0.0)),
    "SquaredError": _scalar(
        Derivative(lambda args, size, a, b: 2.0 * (a - b), (0, 1)),
        Derivative(lambda args, size, a, b: 2.0 * (b - a), (0, 1)),
    ),
    "Where": _scalar(
        ONE,
        Derivative(lambda args, size, condition: condition != 0.0, (0,)),
        Derivative(lambda args, size, condition: condition == 0.0, (0,)),
    ),
    # They compute in float in cudnn:half: their outputs stay fp32 until a half function reads them.
    "Softmax LogSoftmax SoftmaxCrossEntropy CumSum CumProd Unique": Function(keeps_fp32=True),
    "Shape": Function(keeps_fp32=True, moves_nothing=True),
    # Views and copies of memory.
    "Assign": Function(writes=frozenset({0})),
    "BoolScatter ScatterNd": Function(writes=frozenset({2})),
    "Constant": Function(moves_nothing=True),
    "Unlink": Function(hands_memory_on=True, moves_nothing=True),
    # Functions of this package.
    "ScaledLoss": Function(scales=True),
    "Unscale": Function(unscales=True),
}

FUNCTIONS = {name: row for names, row in _ROWS.items() for name in names.split()}
"""Row of each function, by type name."""

_DEFAULTS = Function()


def properties_of(type_name: str) -> Function:
    """Properties of a function, by type name."""
    return FUNCTIONS.get(type_name, _DEFAULTS)


def is_matrix_product(type_name: str) -> bool:
    """True if functions of this type multiply by weights, with a scale of their own or without."""
    return properties_of(type_name).product is not None


def written_inputs(type_name: str, args: Mapping[str, Any]) -> FrozenSet[int]:
    """Indices of the inputs that a function with these arguments writes."""
    writes = args.get("batch_stat", True) and args.get("update_running_mean", True)
    return properties_of(type_name).writes if writes else frozenset()


def hands_memory_on(type_name: str, args: Mapping[str, Any]) -> bool:
    """True if a function's output shares its input's memory, without access in forward."""
    return properties_of(type_name).hands_memory_on and bool(args.get("inplace", True))
