# SPDX-License-Identifier: Apache-2.0
"""Iterations as an updater runs them: a batch runs again until its scales are good."""

from __future__ import annotations

from typing import Any, Iterable, List, Optional

import nnabla as nn

from nnabla_adaloss import AdaptiveLossScaling


def settle(
    scaling: AdaptiveLossScaling,
    iteration: int = 0,
    scale: Optional[float] = None,
    *,
    leaves: Optional[Iterable[nn.Variable]] = None,
    clear: bool = True,
    **options: Any,
) -> List[str]:
    """Run one iteration with one batch; return the kinds of its passes.

    Args:
        scaling: the engine.
        iteration: its number.
        scale: S0, or None.
        leaves: whose gradients are zeroed before each pass. None: those of all parameters.
        clear: whether buffers are cleared.
        options: what else backward is given.
    """
    kinds: List[str] = []
    zeroed = list(nn.get_parameters().values() if leaves is None else leaves)
    for number in range(8):
        for v in zeroed:
            v.grad.zero()
        scaling.forward(clear_no_need_grad=clear)
        scaling.backward(scale, clear_buffer=clear, iteration=iteration, again=number > 0, **options)
        kinds.append(scaling.result.kind)
        if scaling.settled:
            break
    return kinds
