# SPDX-License-Identifier: Apache-2.0
"""Table of nnabla's functions, one row each; a function without a row has the defaults."""

from __future__ import annotations

import math
from operator import itemgetter
from typing import Any, Callable, Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import nnabla as nn

from .matrix_products import (
    UNSCALED,
    Args,
    Product,
    input_of_convolution,
    input_of_depthwise_convolution,
    inputs_of_activations,
    rows_of_groups,
    shared_axis,
    summed_axis,
)


class Derivative(NamedTuple):
    """Derivative of a scalar function by one of its inputs, for loss weights."""

    # Called with the arguments, the size of that input, and the values that it reads.
    of: Callable[..., complex]
    # Indices of the inputs that it reads; -1: the output.
    reads: Tuple[int, ...] = ()
    # Exponent of that input's factor if the values cannot be read.
    degree: Callable[[Args], float] = lambda args: 1.0


class Function(NamedTuple):
    """Properties of a function of nnabla."""

    # Product with a weight: how its input gradient is scaled, or that it cannot be.
    product: Optional[Product] = None
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
    # True if it scales gradients by hand; True if it leaves an unscaled fp32 gradient in a leaf.
    scales: bool = False
    unscales: bool = False
    # True if backward reads more than `Function.grad_depends_input_data` reports.
    reads_more: bool = False
    # Inputs that forward or backward writes, unless an argument in `_SWITCHES` is false.
    writes: FrozenSet[int] = frozenset()
    # True if its output shares its input's memory, unless its argument `inplace` is false.
    hands_memory_on: bool = False
    # True if it never accesses arrays on the host, because others do all its work.
    moves_nothing: bool = False
    # In half precision: True if it computes and writes in fp32; if all outputs except the first are fp32; if
    # it casts all data that it reads; and the inputs that it reads in half precision.
    keeps_fp32: bool = False
    writes_statistics: bool = False
    casts_data: bool = False
    # True if it multiplies by the ratio of output to input size, cast to the type of its arrays.
    averages: bool = False
    in_half: Callable[[Sequence[nn.Variable]], Sequence[nn.Variable]] = list
    # In 8 bits: inputs that a product multiplies (None: all); True if the first is an output gradient; True
    # if other operations lie between its output's gradient and the product.
    operands: Optional[Tuple[int, ...]] = (0, 1)
    multiplies_gradient: bool = False
    more_behind: bool = False


# x, beta, gamma, mean, variance, and for the fused one a residual input: statistics, beta and gamma are fp32.
_BATCH_NORMALIZATION = Function(
    writes=frozenset({3, 4}),
    writes_statistics=True,
    casts_data=True,
    in_half=lambda inputs: [inputs[0], *inputs[5:]],
)

# They compute in float in cudnn:half: their outputs stay fp32 until a half function reads them.
_IN_FP32 = Function(keeps_fp32=True)

_RECURRENT = Function(UNSCALED, own_references=True, operands=(), more_behind=True)


def _scalar(*derivatives: Derivative) -> Function:
    return Function(derivatives=derivatives, casts_data=True)


ONE = Derivative(lambda args, size: 1.0)
_FACTORS = tuple([Derivative(lambda args, size, other: other, (other,)) for other in (1, 0)])
_OUTPUT = Derivative(lambda args, size, y: y, (-1,))
_DIVISOR = Derivative(lambda args, size, a, b: -a / b / b, (0, 1), lambda args: -1.0)
_POWER = Derivative(lambda args, size, x: args["val"] * x ** (args["val"] - 1.0), (0,), itemgetter("val"))
_DIFFERENCES = tuple(
    [Derivative(lambda args, size, own, other: 2.0 * (own - other), i) for i in ((0, 1), (1, 0))]
)

_ROWS: List[Tuple[str, Function]] = [
    # Products with a scale of their own.
    (
        "Affine",
        Function(
            Product(
                gradient=lambda g, args, scaled_input: g.reshape(math.prod(g.shape[: args["base_axis"]]), -1),
                weight=lambda w, args, scaled_input: w.reshape(w.shape[0], -1).T,  # from (in, out...)
            )
        ),
    ),
    ("Convolution", Function(Product(input_of_convolution))),
    ("Deconvolution", Function(Product(weight=rows_of_groups))),
    ("DepthwiseConvolution", Function(Product(input_of_depthwise_convolution))),
    (
        "DepthwiseDeconvolution",
        Function(
            Product(
                weight=lambda w, args, scaled_input: w.reshape(w.shape[0] // args["divisor"], -1)
            )  # from (in, k...)
        ),
    ),
    # Treated as one large product: its matrices pair every batch element with every other.
    ("BatchMatmul", Function(Product(inputs_of_activations, summed_axis, shared_axis, of_activations=True))),
    # Products without a scale: the weight is a gradient or activation that others read, too.
    ("AdaptiveSeparableConvolution", Function(UNSCALED, operands=(0, 1, 2))),
    ("DeformableConvolution PatchCorrelation", Function(UNSCALED)),
    # It keeps references to its inputs and ignores a swapped copy.
    ("Einsum", Function(UNSCALED, operands=None)),
    # It multiplies by its weight again within backward, under `nn.recompute()`. Inputs are x, weight, and
    # either a bias or batch normalization's parameters.
    (
        "FusedConvolution",
        Function(
            UNSCALED,
            writes=frozenset({4, 5}),
            moves_nothing=True,
            in_half=lambda inputs: [*inputs[:2], *(v for v in inputs[2:3] if v.ndim == 1)],
            more_behind=True,
        ),
    ),
    # They quantize their weight themselves.
    (
        "BinaryConnectAffine BinaryConnectConvolution",
        Function(UNSCALED, reads_more=True, writes=frozenset({2}), operands=(0,)),
    ),
    (
        "BinaryWeightAffine BinaryWeightConvolution",
        Function(UNSCALED, writes=frozenset({2, 3}), operands=(0,)),
    ),
    ("INQAffine INQConvolution", Function(UNSCALED, writes=frozenset({1, 2}), operands=(0,))),
    ("LSTM GRU RNN", _RECURRENT),
    ("SpectralNorm", Function(own_references=True, writes=frozenset({1}))),
    # Functions that nn.grad creates for layers.
    (
        "AffineDataGrad AffineFilterGrad ConvolutionDataGrad ConvolutionFilterGrad DeconvolutionDataGrad "
        "DeconvolutionFilterGrad",
        Function(UNSCALED, multiplies_gradient=True),
    ),
    # Clipping of gradients.
    ("ClipGradByNorm ClipGradByValue", Function(linear=False)),
    ("Sink", Function(linear=False, keeps_gradients=True, moves_nothing=True)),
    # Backward writes the output gradient into its second input, for the user to read.
    ("VATNoise", Function(linear=False, writes=frozenset({1}), casts_data=True)),
    ("Identity Transpose", Function(never_enlarges=True)),
    ("Reshape", Function(never_enlarges=True, hands_memory_on=True)),
    ("Add2 Sub2 ReLU Sigmoid Tanh", Function(never_enlarges=True, casts_data=True)),
    # Normalization and quantization.
    ("BatchNormalization FusedBatchNormalization SyncBatchNormalization", _BATCH_NORMALIZATION),
    ("MeanSubtraction MinMaxQuantize", Function(writes=frozenset({1, 2}), casts_data=True)),
    ("QuantizeLinear", Function(writes=frozenset({2}), casts_data=True)),
    # Arithmetic, comparisons, activations, reductions.
    (
        "AddN BcAdd2 MulN Pow2 Maximum2 Minimum2 AbsoluteError HuberLoss EpsilonInsensitiveLoss AddScalar "
        "RSubScalar MaximumScalar MinimumScalar Abs Erf Sin Cos Tan Sinh Cosh ASin ACos ATan ATan2 ASinh "
        "ACosh ATanh Sort TopKData TopKGrad Equal NotEqual Greater GreaterEqual Less LessEqual EqualScalar "
        "NotEqualScalar GreaterScalar GreaterEqualScalar LessScalar LessEqualScalar",
        Function(casts_data=True),
    ),
    ("MulScalar", _scalar(Derivative(lambda args, size: args["val"]))),
    # The sum has as many terms as elements.
    ("Sum", _scalar(Derivative(lambda args, size: size))),
    ("Mul2", _scalar(*_FACTORS)),
    ("Div2", _scalar(Derivative(lambda args, size, b: 1.0 / b, (1,)), _DIVISOR)),
    ("RDivScalar", _scalar(_DIVISOR._replace(of=lambda args, size, x: -args["val"] / x / x, reads=(0,)))),
    ("PowScalar", _scalar(_POWER)),
    ("RPowScalar", _scalar(_OUTPUT._replace(of=lambda args, size, y: math.log(args["val"]) * y))),
    ("Exp", _scalar(_OUTPUT)),
    ("Log", _scalar(Derivative(lambda args, size, x: 1.0 / x, (0,), lambda args: 0.0))),
    ("SquaredError", _scalar(*_DIFFERENCES)),
    (
        "Where",
        _scalar(
            ONE,
            Derivative(lambda args, size, condition: condition != 0.0, (0,)),
            Derivative(lambda args, size, condition: condition == 0.0, (0,)),
        ),
    ),
    ("Mean", Function(averages=True, casts_data=True)),
    (
        "LeakyReLU ReLU6 CReLU ELU CELU SELU GELU Swish Mish SoftPlus SoftSign LogSigmoid HardSigmoid "
        "HardTanh LayerNormalization InstanceNormalization GroupNormalization",
        Function(casts_data=True),
    ),
    ("Softmax LogSoftmax SoftmaxCrossEntropy CumSum CumProd Unique", _IN_FP32),
    ("Shape", _IN_FP32._replace(moves_nothing=True)),
    # Views and copies of memory.
    ("Assign", Function(writes=frozenset({0}))),
    ("BoolScatter ScatterNd", Function(writes=frozenset({2}))),
    ("Constant", Function(moves_nothing=True)),
    ("Unlink", Function(hands_memory_on=True, moves_nothing=True)),
    # Functions of this package.
    ("ScaledLoss", Function(scales=True)),
    ("Unscale", Function(unscales=True)),
]

FUNCTIONS: Dict[str, Function] = {name: row for names, row in _ROWS for name in names.split()}
"""Row of each function, by type name."""

_ORDINARY = Function()

# Arguments that, if false, keep a function from writing inputs.
_SWITCHES = ("batch_stat", "update_running_mean")


def properties_of(type_name: str) -> Function:
    """Properties of a function, by type name."""
    return FUNCTIONS.get(type_name, _ORDINARY)


def is_matrix_product(type_name: str) -> bool:
    """True if functions of this type multiply by weights, with a scale of their own or without."""
    return properties_of(type_name).product is not None


def written_inputs(type_name: str, args: Mapping[str, Any]) -> FrozenSet[int]:
    """Indices of the inputs that a function writes, by the table."""
    return properties_of(type_name).writes if all(args.get(name, True) for name in _SWITCHES) else frozenset()


def hands_memory_on(type_name: str, args: Mapping[str, Any]) -> bool:
    """True if a function's output shares its input's memory, without access in forward."""
    return properties_of(type_name).hands_memory_on and bool(args.get("inplace", True))
