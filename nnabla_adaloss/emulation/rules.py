# SPDX-License-Identifier: Apache-2.0
"""What a half-precision GPU stores in half precision, and what it keeps in fp32."""

from __future__ import annotations

from typing import Any, FrozenSet, List, Tuple

import nnabla as nn

from ..graph.functions import known
from ..graph.matrix_products import UNSCALED

# They leave an unscaled fp32 gradient in a leaf: rounding it would undo what scaling saved.
_UNSCALES: FrozenSet[str] = frozenset({"Unscale", "TrackedUnscale"})


def half_outputs(f: Any) -> List[nn.Variable]:
    """The outputs of `f` that are stored in half precision."""
    function = known(f.info.type_name)
    if function.keeps_fp32 or any(f.inplace_data(i) == 1 for i in range(len(f.inputs))):
        # An output that aliases its input was rounded with it, or is an fp32 master.
        return []
    outputs: List[nn.Variable] = f.outputs
    return outputs[:1] if function.writes_statistics else outputs


def leaves_of(f: Any, *, casts_data: bool = True) -> Tuple[List[nn.Variable], List[nn.Variable]]:
    """The leaves that `f` reads in half precision, such as weights and the data of matrix products, and those
    that it reads in fp32. `casts_data`: whether arithmetic casts data without gradient, such as masks.
    """
    function, inputs = known(f.info.type_name), f.inputs
    half: List[nn.Variable] = []
    # Functions with references of their own read weights through them: no swap reaches these.
    if not (function.keeps_fp32 or function.own_references):
        # Other leaves without a gradient may be labels or indices, which a half GPU keeps as they are.
        casts = function.product not in (None, UNSCALED) or (casts_data and function.casts_data)
        half = [v for v in function.in_half(inputs) if v.parent is None and (v.need_grad or casts)]
    keys = set(map(hash, half))
    return half, [v for v in inputs if v.parent is None and hash(v) not in keys]


def half_gradients(f: Any) -> List[nn.Variable]:
    """The inputs of `f` whose gradients are stored in half precision when `f` has run."""
    type_name = f.info.type_name
    function = known(type_name)
    if type_name in _UNSCALES:
        return []
    # A gradient is half when the function that writes it or the one that reads it is.
    found = [
        v
        for v in function.in_half(f.inputs)
        if v.need_grad and not (function.keeps_fp32 and (v.parent is None or keeps_fp32(v.parent)))
    ]
    return list({hash(v): v for v in found}.values())


def keeps_fp32(f: Any) -> bool:
    """Whether what `f` writes stays fp32 until a half function reads it."""
    return known(f.info.type_name).keeps_fp32
