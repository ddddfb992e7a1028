# SPDX-License-Identifier: Apache-2.0
"""What a half-precision GPU stores in half precision, and what it keeps in fp32."""

from __future__ import annotations

from typing import Any, FrozenSet, List, Sequence, Tuple

import nnabla as nn

from ..graph.function_kinds import OWN_REFERENCES
from ..graph.matrix_products import SCALABLE

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


def half_outputs(f: Any) -> List[nn.Variable]:
    """The outputs of `f` that are stored in half precision."""
    type_name = f.info.type_name
    if type_name in KEEPS_FP32 or any(f.inplace_data(i) == 1 for i in range(len(f.inputs))):
        # An output that aliases its input was rounded with it, or is an fp32 master.
        return []
    outputs: List[nn.Variable] = f.outputs
    return outputs[:1] if type_name in _BATCH_NORMALIZATIONS else outputs


def leaves_of(f: Any, *, casts_data: bool = True) -> Tuple[List[nn.Variable], List[nn.Variable]]:
    """The leaves that `f` reads in half precision, such as weights and the data of matrix products, and those
    that it reads in fp32. `casts_data`: whether arithmetic casts data without gradient, such as masks.
    """
    type_name, inputs = f.info.type_name, f.inputs
    half: List[nn.Variable] = []
    # Functions with references of their own read weights through them: no swap reaches these.
    if type_name not in KEEPS_FP32 and type_name not in OWN_REFERENCES:
        # Other leaves without a gradient may be labels or indices, which a half GPU keeps as they are.
        casts = type_name in SCALABLE or (casts_data and type_name in _ARITHMETIC)
        read = _parameters_in_half(type_name, inputs)
        half = [v for v in read if v.parent is None and (v.need_grad or casts)]
    keys = set(map(hash, half))
    return half, [v for v in inputs if v.parent is None and hash(v) not in keys]


def half_gradients(f: Any) -> List[nn.Variable]:
    """The inputs of `f` whose gradients are stored in half precision when `f` has run."""
    type_name = f.info.type_name
    if type_name in _UNSCALES:
        return []
    # A gradient is half when the function that writes it or the one that reads it is.
    found = [
        v
        for v in _parameters_in_half(type_name, f.inputs)
        if v.need_grad and not (type_name in KEEPS_FP32 and (v.parent is None or keeps_fp32(v.parent)))
    ]
    return list({hash(v): v for v in found}.values())


def keeps_fp32(f: Any) -> bool:
    """Whether what `f` writes stays fp32 until a half function reads it."""
    return f.info.type_name in KEEPS_FP32


def _parameters_in_half(type_name: str, inputs: Sequence[nn.Variable]) -> Sequence[nn.Variable]:
    if type_name in _BATCH_NORMALIZATIONS:
        # x, beta, gamma, mean, variance, and for the fused one a residual input.
        return [inputs[0], *inputs[5:]]
    if type_name == "FusedConvolution":
        # x, weight, and a bias or what batch normalization needs, never both.
        return [*inputs[:2], *(v for v in inputs[2:3] if v.ndim == 1)]
    return inputs
