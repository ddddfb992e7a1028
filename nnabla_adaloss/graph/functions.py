# SPDX-License-Identifier: Apache-2.0
"""What is known of nnabla's functions: one row each. Of a function without a row the defaults hold.

Only a matrix product can be given a scale of its own: its input gradient is `g` times the weight, so handing
it `alpha * weight` scales the input gradient and nothing else. The fan-in K is the number of products that
are added up in one element of that input gradient (Zhao et al. 2019, section 3.2).
"""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import nnabla as nn
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


def _slot_of_convolution(args: Args, inputs: Sequence[Shape], output: Shape) -> List[GemmSlot]:
    """One slot for x; strides decide which taps of (out, in/group, k...) an element meets."""
    weight = inputs[1]
    kernel = weight[1:-1] if args["channel_last"] else weight[2:]
    return [GemmSlot(0, 1, *_strided(kernel, args["stride"], weight[0] // args["group"]))]


def _slot_of_depthwise_convolution(args: Args, inputs: Sequence[Shape], output: Shape) -> List[GemmSlot]:
    """One slot for x; strides decide which taps of (in * multiplier, k...) an element meets."""
    return [GemmSlot(0, 1, *_strided(inputs[1][1:], args["stride"], args["multiplier"]))]


def _slots_of_activations(args: Args, inputs: Sequence[Shape], output: Shape) -> List[GemmSlot]:
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


def _summed_axis(g: NDArray[Any], args: Args, slot: GemmSlot) -> NDArray[Any]:
    """Of a product of activations, the axis that is summed over."""
    moved = np.moveaxis(g, -1 if slot.input == 0 else -2, -1)
    return moved.reshape(-1, moved.shape[-1])


# The weight, or other operand, as (C, M).


def _rows(w: NDArray[Any], args: Args, slot: GemmSlot) -> NDArray[Any]:
    """From (out, ...)."""
    return w.reshape(w.shape[0], -1)


def _rows_of_groups(w: NDArray[Any], args: Args, slot: GemmSlot) -> NDArray[Any]:
    """From (in, out/group, k...) by way of (out, in/group, k...)."""
    group = args["group"]
    split = w.reshape(group, w.shape[0] // group, w.shape[1], -1)
    return split.transpose(0, 2, 1, 3).reshape(group * w.shape[1], -1)


def _shared_axis(w: NDArray[Any], args: Args, slot: GemmSlot) -> NDArray[Any]:
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


def _no_slots(args: Args, inputs: Sequence[Shape], output: Shape) -> List[GemmSlot]:
    return []


UNSCALED = Product(_no_slots)
"""A product that gets no scale of its own: the weight that it multiplies by cannot be swapped."""


class Function(NamedTuple):
    """What is special about a function of nnabla."""

    # A product with a weight, and how its input gradient gets a scale of its own, or that it gets none.
    product: Optional[Product] = None
    # Whether swapping arrays of its parameters has no effect, as it keeps references of its own.
    own_references: bool = False
    # Whether its gradient is proportional to the output gradient: neither clipped nor ignored.
    linear: bool = True
    # Whether no element of an input gradient of the same size is larger than the largest it gets.
    never_enlarges: bool = False
    # Whether backward reads more than `Function.grad_depends_input_data` says.
    reads_more: bool = False
    # The inputs that forward or backward writes; none, where an argument in `_SWITCHES` is false.
    writes: FrozenSet[int] = frozenset()
    # Whether it touches no memory of an array on the host: all its work is done by others, if there is any.
    moves_nothing: bool = False
    # In half precision: whether it computes and writes in fp32; whether all but its first output are fp32;
    # whether it casts all data that it reads; which inputs it reads in half precision.
    keeps_fp32: bool = False
    writes_statistics: bool = False
    casts_data: bool = False
    in_half: Callable[[Sequence[nn.Variable]], Sequence[nn.Variable]] = list
    # In 8 bits: which inputs a product multiplies (None: all); whether the first is an output gradient; and
    # whether between its output's gradient and the product lies more.
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

# They compute in float in cudnn:half: what they write stays fp32 until a half function reads it.
_REDUCTION = Function(keeps_fp32=True)

# Numbers that stand for indices or truth values: rounding 2049 to 2048 would change their meaning.
_INDICES = Function(keeps_fp32=True)

_RECURRENT = Function(UNSCALED, own_references=True, operands=(), more_behind=True)

_ROWS: List[Tuple[str, Function]] = [
    # Products with a scale of their own.
    (
        "Affine",
        Function(
            Product(
                gradient=lambda g, args, slot: g.reshape(math.prod(g.shape[: args["base_axis"]]), -1),
                factor=lambda w, args, slot: w.reshape(w.shape[0], -1).T,  # from (in, out...)
            )
        ),
    ),
    ("Convolution", Function(Product(_slot_of_convolution))),
    ("Deconvolution", Function(Product(factor=_rows_of_groups))),
    ("DepthwiseConvolution", Function(Product(_slot_of_depthwise_convolution))),
    (
        "DepthwiseDeconvolution",
        Function(
            Product(
                factor=lambda w, args, slot: w.reshape(w.shape[0] // args["divisor"], -1)
            )  # from (in, k...)
        ),
    ),
    # Taken for one large product: its matrices pair every batch element with every other.
    ("BatchMatmul", Function(Product(_slots_of_activations, _summed_axis, _shared_axis))),
    # Products without: the weight is a gradient or activation that others read, too.
    ("AdaptiveSeparableConvolution", Function(UNSCALED, operands=(0, 1, 2))),
    ("DeformableConvolution PatchCorrelation", Function(UNSCALED)),
    ("Einsum", Function(UNSCALED, operands=None)),
    # It multiplies by its weight again within backward, under `nn.recompute()`. Inputs are x, weight, and a
    # bias or what batch normalization needs, never both.
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
    # What nn.grad makes of layers.
    (
        "AffineDataGrad AffineFilterGrad ConvolutionDataGrad ConvolutionFilterGrad DeconvolutionDataGrad "
        "DeconvolutionFilterGrad",
        Function(UNSCALED, multiplies_gradient=True),
    ),
    # Gradients.
    ("ClipGradByNorm ClipGradByValue", Function(linear=False)),
    ("Sink", Function(linear=False, moves_nothing=True)),
    # Backward writes the output gradient into its second input, for the user to read.
    ("VATNoise", Function(linear=False, writes=frozenset({1}))),
    ("Identity Reshape Transpose", Function(never_enlarges=True)),
    ("Add2 Sub2 ReLU Sigmoid Tanh", Function(never_enlarges=True, casts_data=True)),
    # Normalization and quantization.
    ("BatchNormalization FusedBatchNormalization SyncBatchNormalization", _BATCH_NORMALIZATION),
    ("MeanSubtraction MinMaxQuantize", Function(writes=frozenset({1, 2}))),
    ("QuantizeLinear", Function(writes=frozenset({2}))),
    # Arithmetic, activations, reductions, indices.
    (
        "AddN BcAdd2 Mul2 MulN Div2 Pow2 Maximum2 Minimum2 SquaredError AbsoluteError HuberLoss "
        "EpsilonInsensitiveLoss AddScalar MulScalar PowScalar RSubScalar RDivScalar RPowScalar MaximumScalar "
        "MinimumScalar Abs Exp Log Erf Sin Cos Tan Sinh Cosh ASin ACos ATan ATan2 ASinh ACosh ATanh",
        Function(casts_data=True),
    ),
    (
        "LeakyReLU ReLU6 CReLU ELU CELU SELU GELU Swish Mish SoftPlus SoftSign LogSigmoid HardSigmoid "
        "HardTanh LayerNormalization InstanceNormalization GroupNormalization",
        Function(casts_data=True),
    ),
    ("Softmax LogSoftmax SoftmaxCrossEntropy CumSum CumProd", _REDUCTION),
    ("Arange OneHot Sort TopKData TopKGrad Unique", _INDICES),
    ("Shape", _INDICES._replace(moves_nothing=True)),
    ("Equal NotEqual Greater GreaterEqual Less LessEqual", _INDICES),
    ("EqualScalar NotEqualScalar GreaterScalar GreaterEqualScalar LessScalar LessEqualScalar", _INDICES),
    # Memory.
    ("Assign", Function(writes=frozenset({0}))),
    ("BoolScatter ScatterNd", Function(writes=frozenset({2}))),
    ("Constant Unlink", Function(moves_nothing=True)),
]

FUNCTIONS: Dict[str, Function] = {name: row for names, row in _ROWS for name in names.split()}
"""By the type name of a function, its row."""

_ORDINARY = Function()

# Arguments of functions that write nothing where these are false.
_SWITCHES = ("batch_stat", "update_running_mean")


def known(type_name: str) -> Function:
    """What is known of a function."""
    return FUNCTIONS.get(type_name, _ORDINARY)


def is_matrix_product(type_name: str) -> bool:
    """Whether functions of this type multiply by weights, with a scale of their own or without."""
    return known(type_name).product is not None


def gemm_slots(type_name: str, args: Args, inputs: Sequence[Shape], output: Shape) -> List[GemmSlot]:
    """The inputs of a function whose gradients can carry a scale of their own; none where there is none."""
    product = known(type_name).product
    return product.slots(args, inputs, output) if product else []


def written_inputs(type_name: str, args: Mapping[str, Any]) -> FrozenSet[int]:
    """Indices of the inputs that a function writes, as far as it is known."""
    return known(type_name).writes if all(args.get(name, True) for name in _SWITCHES) else frozenset()


def hands_memory_on(type_name: str, args: Mapping[str, Any]) -> bool:
    """Whether a function's output is its input's memory, which it neither reads nor writes in forward."""
    return type_name == "Unlink" or (type_name == "Reshape" and args["inplace"])
