# SPDX-License-Identifier: Apache-2.0
"""A loss scale as a function of the graph, and its inverse, for the gradients of parameters."""

from __future__ import annotations

import math
from typing import Any, List, Optional, Union

import nnabla as nn

from ..core.components import NodeStructure
from ..graph.graph import Graph
from ..graph.plan import GraphPlan
from ..kernels.arrays import prepare_master, stored_dtype
from .identity import Array, Gradients, check_array
from .scale_tracker import UNSCALED, Points, Redirected, ScaledFunction, ScaleTracker, tracker_of


def loss_scaling(x: Array, scale: Union[float, ScaleTracker], *, ctx: Optional[nn.Context] = None) -> Array:
    """`x`, whose gradient is multiplied by a scale in backward.

    With a number, everything behind `x` gets a gradient `scale` times as large; `unscale(w, scale)` takes it
    back. With a `ScaleTracker`, `x` is the loss, its gradient becomes the tracker's S0, and the graph behind
    is checked and connected.

    Args:
        x: Variable or NdArray of any shape, float32 or float16 (others are copied as float32). An NdArray is
            copied: there is no backward.
        scale: positive and finite; a power of two keeps every bit. Or the tracker of the graph.
        ctx: context to run in; None for the current one.

    Returns:
        Of the type, shape and dtype of `x`.

    Raises:
        TypeError: `x` is no Variable or NdArray, or `scale` neither a number nor a tracker.
        ValueError: `scale` is not positive and finite. With a tracker also: some parameter is used without
            `unscale`, a variable feeds functions at different scales without `branch`, or a function on the
            way (clipping, Sink) does not hand a scale through.

    Source: Zhao et al. 2019 (arXiv 1910.12385), on loss scaling with one scale.

    Example:
        >>> import numpy as np, nnabla as nn, nnabla.functions as F
        >>> from nnabla_adaloss import loss_scaling
        >>> x = nn.Variable.from_numpy_array(np.array([3.0], np.float32), need_grad=True)
        >>> loss = loss_scaling(F.sum(x * x), 1024.0)
        >>> loss.forward()
        >>> x.grad.zero()
        >>> loss.backward()
        >>> float(loss.d), float(x.g[0])
        (9.0, 6144.0)
    """
    check_array("x", x)
    tracker = tracker_of(scale)
    y = LossScaling(tracker, ctx, name="ScaledLoss" if tracker.is_shared else None).apply(x)
    if tracker.is_shared and isinstance(y, nn.Variable) and y.need_grad:
        tracker.connect(y)
    return y


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
    tracker = tracker_of(scale)
    v = Unscale(tracker, ctx).apply(w)
    if tracker.is_shared and isinstance(v, nn.Variable):
        # Recomputing the copy in the middle of backward would undo the layer's scale on it.
        v.recompute = False
    return v


class LossScaling(ScaledFunction):
    """Identity where a backward pass of its tracker starts: it multiplies the gradient by S0."""

    def connect(self, arriving: Points, node: NodeStructure, graph: Graph, plan: GraphPlan) -> Redirected:
        if arriving:
            raise ValueError(
                "x has been scaled already: loss_scaling(x, tracker) was applied to a part of it"
            )
        return {}

    def pass_back(self, gradients: Gradients, target: nn.NdArray, accumulate: bool) -> None:
        scale = self.tracker.start_pass()
        self.tracker.set_scale(self.point, scale)
        self.pass_gradient(gradients[0], target, scale, accumulate=accumulate)


class Unscale(ScaledFunction):
    """Identity that divides the gradient by S; its output is a copy of the weight that a layer may scale."""

    def __init__(self, tracker: ScaleTracker, context: Optional[nn.Context] = None) -> None:
        super().__init__(tracker, context)
        self.passed = UNSCALED
        self.factor = 1.0  # the copy holds this times the weight
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
        self.tracker.set_scale(self.point, 1.0)
        source = gradients[0]
        if stored_dtype(source) is not None:
            prepare_master(target, self.kernels.context)
            accumulate = accumulate and not target.zeroing
            largest = self.kernels.unscale_add(source, target, scale, accumulate=accumulate)
            self.tracker.found_inf |= not math.isfinite(largest)
        elif not accumulate:
            # It stays lazily zero: a solver passes over a parameter that no gradient has reached.
            target.zero()
