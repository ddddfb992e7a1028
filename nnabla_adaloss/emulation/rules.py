# SPDX-License-Identifier: Apache-2.0
"""What a half-precision GPU stores in half precision, and what it keeps in fp32."""

from __future__ import annotations

from typing import Any, Dict, FrozenSet, List, Sequence, Tuple

import nnabla as nn

from ..graph.function_kinds import OWN_REFERENCES
from ..graph.matrix_products import is_matrix_product, is_scalable

# cudnn:half computes these in float: what they write stays fp32 until a half function reads it.
_REDUCTIONS: FrozenSet[str] = frozenset({"Softmax", "LogSoftmax", "SoftmaxCrossEntropy", "CumSum", "CumProd"})

# Numbers that stand for indices or truth values: rounding 2049 to 2048 would change their meaning.
_INDICES: FrozenSet[str] = frozenset({"Arange", "OneHot", "Shape", "Sort", "TopKData", "TopKGrad", "Unique"})
_COMPARISONS: FrozenSet[str] = frozenset(
    name + suffix
    for name in ("Equal", "NotEqual", "Greater", "GreaterEqual", "Less", "LessEqual")
    for suffix in ("", "Scalar")
)
KEEPS_FP32: FrozenSet[str] = _REDUCTIONS | _INDICES | _COMPARISONS

# They cast everything that they read to half.
_ARITHMETIC: FrozenSet[str] = frozenset(
    {"Add2", "AddN", "BcAdd2", "Sub2", "Mul2", "MulN", "Div2", "Pow2", "Maximum2", "Minimum2"}
    | {"SquaredError", "AbsoluteError", "HuberLoss", "EpsilonInsensitiveLoss"}
)

# Statistics, beta and gamma are fp32 in every half-precision batch normalization.
_BATCH_NORMALIZATIONS: FrozenSet[str] = frozenset(
    {"BatchNormalization", "FusedBatchNormalization", "SyncBatchNormalization"}
)

# They leave an unscaled fp32 gradient in a leaf: rounding it would undo what scaling saved.
_UNSCALES: FrozenSet[str] = frozenset({"Unscale", "TrackedUnscale"})

# Products whose operands are not their first two inputs.
_OPERANDS: Dict[str, Tuple[int, ...]] = {
    "AdaptiveSeparableConvolution": (0, 1, 2),
    # They quantize their weight themselves.
    **dict.fromkeys(
        (
            "BinaryConnectAffine",
            "BinaryConnectConvolution",
            "BinaryWeightAffine",
            "BinaryWeightConvolution",
            "INQAffine",
            "INQConvolution",
        ),
        (0,),
    ),
    # No swap reaches what these read.
    **dict.fromkeys(OWN_REFERENCES, ()),
}

# Their first input is an output gradient.
_READ_GRADIENTS: FrozenSet[str] = frozenset(
    name + grad for name in ("Affine", "Convolution", "Deconvolution") for grad in ("DataGrad", "FilterGrad")
)

# Between the gradient of their output and their product lies more: batch normalization, gates.
_GRADIENT_WITHIN: FrozenSet[str] = frozenset({"FusedConvolution", *OWN_REFERENCES})


def half_outputs(f: Any) -> List[nn.Variable]:
    """The outputs of `f` that are stored in half precision."""
    type_name = f.info.type_name
    if type_name in KEEPS_FP32 or any(f.inplace_data(i) == 1 for i in range(len(f.inputs))):
        # An output that aliases its input was rounded with it, or is an fp32 master.
        return []
    outputs: List[nn.Variable] = f.outputs
    return outputs[:1] if type_name in _BATCH_NORMALIZATIONS else outputs


def half_leaves(f: Any, *, casts_data: bool = True) -> List[nn.Variable]:
    """The leaves that `f` reads in half precision: weights, and the data of matrix products and arithmetic.

    Args:
        f: the function.
        casts_data: whether arithmetic casts data that needs no gradient, as an attention mask.
    """
    type_name = f.info.type_name
    if type_name in KEEPS_FP32 or type_name in OWN_REFERENCES:
        # The latter read weights through references that no swap reaches.
        return []
    inputs = _parameters_in_half(type_name, f.inputs)
    # Other leaves without a gradient may be labels or indices, which a half GPU keeps as they are.
    casts = is_scalable(type_name) or (casts_data and type_name in _ARITHMETIC)
    return [v for v in inputs if v.parent is None and (v.need_grad or casts)]


def fp32_leaves(f: Any, *, casts_data: bool = True) -> List[nn.Variable]:
    """The leaves that `f` reads in fp32; `casts_data` as for `half_leaves`."""
    half = {hash(v) for v in half_leaves(f, casts_data=casts_data)}
    return [v for v in f.inputs if v.parent is None and hash(v) not in half]


def half_gradients(f: Any) -> List[nn.Variable]:
    """The inputs of `f` whose gradients are stored in half precision when `f` has run."""
    type_name = f.info.type_name
    keeps = type_name in KEEPS_FP32
    found: List[nn.Variable] = []
    if type_name in _UNSCALES:
        return found
    for v in _parameters_in_half(type_name, f.inputs):
        # A gradient is half when the function that writes it or the one that reads it is.
        reader_keeps = v.parent is None or v.parent.info.type_name in KEEPS_FP32
        if v.need_grad and not (keeps and reader_keeps):
            found.append(v)
    return list({hash(v): v for v in found}.values())


def operands(f: Any) -> List[Tuple[int, nn.Variable, bool]]:
    """The inputs that `f` multiplies: index, variable, and whether it holds an output gradient.

    A single element is not worth rounding.
    """
    type_name = f.info.type_name
    if not is_matrix_product(type_name):
        return []
    inputs = f.inputs
    indices = [i for i in _operand_indices(type_name, inputs) if inputs[i].size > 1]
    return [(i, inputs[i], i == 0 and type_name in _READ_GRADIENTS) for i in indices]


def read_in_backward(f: Any, index: int) -> bool:
    """Whether backward of the product `f` reads its operand `index`: if its factor there needs a gradient."""
    inputs = f.inputs
    others = {0, 1, *_operand_indices(f.info.type_name, inputs)} - {index}
    return any(v.need_grad for i, v in enumerate(inputs) if i in others)


def gradient_operands(f: Any) -> List[nn.Variable]:
    """The outputs of `f` whose gradients it multiplies in backward."""
    type_name = f.info.type_name
    if not is_matrix_product(type_name) or type_name in _GRADIENT_WITHIN:
        return []
    return [v for v in f.outputs if v.size > 1]


def _operand_indices(type_name: str, inputs: Sequence[nn.Variable]) -> Sequence[int]:
    return range(len(inputs)) if type_name == "Einsum" else _OPERANDS.get(type_name, (0, 1))


def _parameters_in_half(type_name: str, inputs: Sequence[nn.Variable]) -> Sequence[nn.Variable]:
    if type_name in _BATCH_NORMALIZATIONS:
        # x, beta, gamma, mean, variance, and for the fused one a residual input.
        return [inputs[0], *inputs[5:]]
    if type_name == "FusedConvolution":
        # x, weight, and a bias or what batch normalization needs, never both.
        return [*inputs[:2], *(v for v in inputs[2:3] if v.ndim == 1)]
    return inputs
