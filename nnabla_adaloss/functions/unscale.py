# SPDX-License-Identifier: Apache-2.0
"""A parameter at use, whose gradient comes back unscaled."""

from __future__ import annotations

import math
from typing import Any, List, Optional, Union

import nnabla as nn

from ..core.validation import positive_number
from ..kernels import Kernels
from ..kernels.arrays import prepare_master, stored_dtype
from .identity import Array, Gradients, IdentityFunction, check_array
from .scale_tracker import ScaleTracker, TrackedFunction


def unscale(w: Array, scale: Union[float, ScaleTracker], *, ctx: Optional[nn.Context] = None) -> Array:
    """`w`, whose gradient is divided by its scale in backward, in float32.

    In float16 a small gradient would underflow again: that of `w` is float32, whatever the context.

    Args:
        w: parameter, or input whose gradient is wanted: Variable or NdArray of any shape, float32 or float16
            (others are copied as float32). An NdArray is copied: there is no backward.
        scale: what to divide by, positive and finite. Or the tracker of the graph, which knows S where the
            result is used; then uses of a parameter at different S need an `unscale` each.
        ctx: context to run in; None for the current one.

    Returns:
        Of the type, shape and dtype of `w`. With `nnabla.parametric_functions` it is given as
        `apply_w=lambda w: unscale(w, tracker)`, and likewise `apply_b`.

    Raises:
        TypeError: `w` is no Variable or NdArray, or `scale` neither a number nor a tracker.
        ValueError: `scale` is not positive and finite.
        RuntimeError: backward did not start at the tracker's loss; nnabla hides it behind a SystemError.

    Source: Zhao et al. 2019 (arXiv 1910.12385), algorithm 1.

    Example:
        >>> import numpy as np, nnabla as nn, nnabla.functions as F
        >>> from nnabla_adaloss import unscale
        >>> w = nn.Variable.from_numpy_array(np.array([3.0], np.float32), need_grad=True)
        >>> v = unscale(w, 1024.0)
        >>> loss = F.sum(v * v)
        >>> loss.forward()
        >>> w.grad.zero()
        >>> loss.backward(1024.0)
        >>> float(w.g[0])
        6.0
    """
    check_array("w", w)
    if not isinstance(scale, ScaleTracker):
        return Unscale(positive_number("scale", scale), ctx)(w)
    v = TrackedUnscale(scale, ctx).apply(w)
    if isinstance(v, nn.Variable):
        # Recomputing the copy in the middle of backward would undo the layer's scale on it.
        v.recompute = False
    return v


def divide_gradient(
    kernels: Kernels, source: nn.NdArray, master: nn.NdArray, scale: float, *, accumulate: bool
) -> bool:
    """Write source / scale to `master` in float32, or add it; returns whether a result is not finite."""
    if stored_dtype(source) is None:
        # It stays lazily zero: a solver passes over a parameter that no gradient has reached.
        if not accumulate:
            master.zero()
        return False
    prepare_master(master, kernels.context)
    largest = kernels.unscale_add(source, master, scale, accumulate=accumulate and not master.zeroing)
    return not math.isfinite(largest)


class Unscale(IdentityFunction):
    """Identity that divides the gradient by a constant."""

    def __init__(self, scale: float, context: Optional[nn.Context] = None) -> None:
        super().__init__(context)
        self._scale = scale

    def pass_back(self, gradients: Gradients, target: nn.NdArray, accumulate: bool) -> None:
        divide_gradient(self.kernels, gradients[0], target, self._scale, accumulate=accumulate)


class TrackedUnscale(TrackedFunction):
    """Identity that divides the gradient by S; its output is a copy of the weight that a layer may scale."""

    def __init__(self, tracker: ScaleTracker, context: Optional[nn.Context] = None) -> None:
        super().__init__(tracker, context)
        self.behind = tracker.unit
        self.factor = 1.0  # what the copy holds is this times the weight
        self.taken = False  # whether a layer scales the copy

    def forward_impl(self, inputs: List[Any], outputs: List[Any]) -> None:
        self.factor = 1.0
        super().forward_impl(inputs, outputs)

    def scale_copy(self, copy: nn.NdArray, factor: float) -> None:
        """Let the copy hold factor times the weight."""
        if factor != self.factor:
            self.kernels.scale_(copy, factor / self.factor)
            self.factor = factor

    def pass_back(self, gradients: Gradients, target: nn.NdArray, accumulate: bool) -> None:
        scale = self.arriving_scale()
        self.point.set(1.0)
        self.tracker.found_inf |= divide_gradient(
            self.kernels, gradients[0], target, scale, accumulate=accumulate
        )
