# SPDX-License-Identifier: Apache-2.0
"""What happened to the batches of one update on this rank, and why."""

from __future__ import annotations

import math
from typing import Any, Mapping, NamedTuple, Optional, Tuple

import numpy as np

from ..engine import AdaptiveLossScaling
from ..engine.forward_fault import ForwardFault


class Window(NamedTuple):
    """The first overflow of a window of `accum_grad` batches on this rank, if there was one.

    Attributes:
        overflowed: whether a gradient that the solver is going to use was not finite.
        nonfinite_layers: names of the layers whose gradients were not finite, also of those that the solver
            has nothing to do with; the first in backward order first.
        nonfinite_loss: whether the loss was not finite.
        fault: where forward was not finite, in a way that no loss scale mends.
        layer_to_blame: the layer whose own scale is the cause; None: another cause, or none.
        layer_scales: the scales that layers had then.
    """

    overflowed: bool = False
    nonfinite_layers: Tuple[str, ...] = ()
    nonfinite_loss: bool = False
    fault: Optional[ForwardFault] = None
    layer_to_blame: Optional[str] = None
    layer_scales: Mapping[str, float] = {}


def examine(window: Window, scaling: AdaptiveLossScaling, solver: Any, smallest_scale: float) -> Window:
    """The window after a pass that found infinities or NaNs: only gradients of the solver's parameters count.

    Where forward itself is not finite, backward runs once more with the smallest scale: when gradients are
    finite then (an attention mask of minus infinity is no fault), the scale was too large all the same.

    Args:
        window: what is known of the batches before.
        scaling: has just run forward and backward.
        solver: the solver.
        smallest_scale: the smallest global loss scale there is.
    """
    layers = tuple(dict.fromkeys((*window.nonfinite_layers, *scaling.found_inf)))
    if window.overflowed or not solver.check_inf_or_nan_grad():
        return window._replace(nonfinite_layers=layers)
    nonfinite_loss = not np.isfinite(scaling.variable.d).all()
    blame, scales = scaling.layer_to_blame(), scaling.layer_scales
    fault = scaling.guard.find_fault()
    if fault is not None and not nonfinite_loss:
        solver.zero_grad()
        scaling.backward(smallest_scale, clear_buffer=True, iteration=scaling.iteration - 1)
        if not solver.check_inf_or_nan_grad():
            fault = None
            # These gradients are no use, and other ranks shall see it in their sum.
            next(iter(solver.get_parameters().values())).grad.fill(math.inf)
    return Window(True, layers, nonfinite_loss, fault, blame, scales)
