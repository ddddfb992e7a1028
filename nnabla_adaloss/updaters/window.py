# SPDX-License-Identifier: Apache-2.0
"""What happened to the batches of one update on this rank, and why."""

from __future__ import annotations

import math
from typing import Any, Mapping, NamedTuple, Optional, Tuple

import numpy as np

from ..engine import AdaptiveLossScaling
from ..undo import ForwardFault
from .finite_gradients import gradients_are_finite


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
        overflow_layers: as `nonfinite_layers`, where a batch was repeated for that.
        lowered: whether something was lowered because of it on this rank, other than S0.
        at_floor: whether nothing was left that could go lower.
        exhausted: whether the batch was repeated too often.
    """

    overflowed: bool = False
    nonfinite_layers: Tuple[str, ...] = ()
    nonfinite_loss: bool = False
    fault: Optional[ForwardFault] = None
    layer_to_blame: Optional[str] = None
    layer_scales: Mapping[str, float] = {}
    overflow_layers: Tuple[str, ...] = ()
    lowered: bool = False
    at_floor: bool = False
    exhausted: bool = False

    def after_repeat(self, found: Window) -> Window:
        """The window before a batch that is going to be repeated because of what was `found`."""
        return self._replace(
            overflow_layers=found.nonfinite_layers if found.overflowed else self.overflow_layers
        )


NOTHING_WRONG = Window()
"""That of batches with which nothing was wrong."""


def examine(window: Window, scaling: AdaptiveLossScaling, solver: Any, smallest_scale: float) -> Window:
    """The window after a pass: only infinities and NaNs in the gradients of the solver's parameters count.

    Where forward itself is not finite, backward runs once more with the smallest scale: when gradients are
    finite then (an attention mask of minus infinity is no fault), the scale was too large all the same.

    Args:
        window: what is known of the batches before.
        scaling: has just run forward and backward.
        solver: the solver.
        smallest_scale: the smallest global loss scale there is.
    """
    if not scaling.found_inf:
        return window
    layers = tuple(dict.fromkeys((*window.nonfinite_layers, *scaling.found_inf)))
    if window.overflowed or gradients_are_finite(scaling.kernels, solver):
        return window._replace(nonfinite_layers=layers)
    nonfinite_loss = not np.isfinite(scaling.variable.d).all()
    blame, scales = scaling.layer_to_blame(), scaling.layer_scales
    fault = scaling.guard.find_fault()
    if fault is not None and not nonfinite_loss and _finite_at(smallest_scale, scaling, solver):
        fault = None
        spoil(solver)
    return Window(True, layers, nonfinite_loss, fault, blame, scales, window.overflow_layers)


def smallest_scale_helps(scaling: AdaptiveLossScaling, solver: Any, smallest_scale: float) -> bool:
    """Whether gradients of the last batch are finite at the smallest scale; they are of no use afterwards."""
    scaling.guard.rewind()
    scaling.forward(clear_no_need_grad=True)
    helps = _finite_at(smallest_scale, scaling, solver)
    spoil(solver)
    return helps


def _finite_at(scale: float, scaling: AdaptiveLossScaling, solver: Any) -> bool:
    solver.zero_grad()
    scaling.probe(scale)
    return gradients_are_finite(scaling.kernels, solver)


def spoil(solver: Any) -> None:
    """Make gradients that are of no use show it, also in their sum over ranks."""
    next(iter(solver.get_parameters().values())).grad.fill(math.inf)
