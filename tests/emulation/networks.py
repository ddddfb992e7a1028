# SPDX-License-Identifier: Apache-2.0
"""What the tests of emulation share: what half precision makes of arrays, by NumPy, and a network."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np

from nnabla_adaloss.graph.description import visited
from tests.worlds.values import constant


def half(array: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.asarray(array, np.float32).astype(np.float16).astype(np.float32)


def leaf(values: Any) -> nn.Variable:
    """A Variable that holds these values in float32 and gets a gradient, which is zero."""
    v = constant(values)
    v.need_grad = True
    v.grad.zero()
    return v


def is_half(array: np.ndarray) -> bool:
    return bool(np.array_equal(array, half(array), equal_nan=True))


def variables_of(loss: nn.Variable) -> Dict[int, nn.Variable]:
    return {hash(v): v for f in visited(loss)[0] for v in (*f.inputs, *f.outputs)}


def arrays_of(loss: nn.Variable) -> List[Tuple[nn.NdArray, nn.NdArray]]:
    return [(v.data, v.grad) for v in variables_of(loss).values()]


def masked_attention() -> nn.Variable:
    rng = np.random.default_rng(0)
    x = constant(rng.standard_normal((2, 6, 8)))
    q, k, v = (PF.affine(x, 8, base_axis=2, name=name) for name in "qkv")
    mask = constant(np.triu(np.full((1, 6, 6), -1e4), 1))
    scores = F.batch_matmul(q, k, transpose_b=True) + F.broadcast(mask, (2, 6, 6))
    return F.mean(F.batch_matmul(F.softmax(scores), v) ** 2)
