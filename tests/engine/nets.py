# SPDX-License-Identifier: Apache-2.0
"""Small networks, and iterations as an updater runs them: a batch runs again until its scales are good."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Optional, Sequence

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import numpy as np

from nnabla_adaloss import AdaptiveLossScaling

HALF = nn.Context(["cpu:half", "cpu:float"], "CpuCachedArray", "0")
FLOAT = nn.Context(["cpu:float"], "CpuCachedArray", "0")
Gradients = Dict[str, np.ndarray]


def layers(*widths: int, names: Sequence[str] = (), batch: int = 4, width: int = 5) -> nn.Variable:
    """Layers of these widths with tanh on random numbers; the network is the only one that has parameters."""
    nn.clear_parameters()
    rng = np.random.RandomState(0)
    h = nn.Variable.from_numpy_array(rng.randn(batch, width).astype(np.float32))
    for index, own in enumerate(widths):
        h = F.tanh(PF.affine(h, own, name=names[index] if names else f"layer{index}", rng=rng))
    return h


def mlp(weight: float = 1.0, *, batch: int = 4) -> nn.Variable:
    """The loss of three layers, a, b and c."""
    return F.mean(layers(6, 6, 6, names="abc", batch=batch) ** 2) * weight


def zero_grads(leaves: Optional[Iterable[nn.Variable]] = None) -> None:
    for v in nn.get_parameters().values() if leaves is None else leaves:
        v.grad.zero()


def gradients() -> Gradients:
    return {name: v.g.copy() for name, v in nn.get_parameters().items()}


def run(loss: Any, *scale: Optional[float], clear: bool = False, **options: Any) -> Gradients:
    """The gradients of one pass, of an engine or of nnabla's own."""
    zero_grads()
    loss.forward(clear_no_need_grad=clear)
    loss.backward(*scale, clear_buffer=clear, **options)
    return gradients()


def settle(
    scaling: AdaptiveLossScaling,
    iteration: int = 0,
    scale: Optional[float] = None,
    *,
    leaves: Optional[Iterable[nn.Variable]] = None,
    clear: bool = True,
    **options: Any,
) -> List[str]:
    """Run one iteration with one batch; return the kinds of its passes."""
    kinds: List[str] = []
    zeroed = None if leaves is None else list(leaves)
    for number in range(8):
        zero_grads(zeroed)
        scaling.forward(clear_no_need_grad=clear)
        scaling.backward(scale, clear_buffer=clear, iteration=iteration, again=number > 0, **options)
        kinds.append(scaling.result.kind)
        if scaling.settled:
            break
    return kinds


def settled(scaling: AdaptiveLossScaling, scale: Optional[float] = 8.0) -> Gradients:
    """The gradients of a batch, with scales that are good."""
    settle(scaling, scaling.iteration, scale, clear=False)
    return gradients()


def assert_same(found: Gradients, expected: Gradients) -> None:
    for name, gradient in expected.items():
        np.testing.assert_array_equal(found[name], gradient, err_msg=name)


def assert_close(found: Gradients, expected: Gradients, rtol: float, atol: float = 0.0) -> None:
    for name, gradient in expected.items():
        np.testing.assert_allclose(found[name], gradient, rtol=rtol, atol=atol, err_msg=name)
