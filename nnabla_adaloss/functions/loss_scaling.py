# SPDX-License-Identifier: Apache-2.0
"""A loss scale as a function of the graph."""

from __future__ import annotations

from typing import Dict, Optional, Union

import nnabla as nn

from ..core.validation import positive_number
from ..graph.node import Node
from ..graph.plan import GraphPlan
from .identity import Array, Gradients, IdentityFunction, check_array
from .scale_flow import ScaleFlow
from .scale_tracker import ScalePoint, ScaleTracker, TrackedFunction


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
    if not isinstance(scale, ScaleTracker):
        return LossScaling(positive_number("scale", scale), ctx)(x)
    y = ScaledLoss(scale, ctx).apply(x)
    if isinstance(y, nn.Variable) and y.need_grad:
        ScaleFlow(y, scale)
    return y


class LossScaling(IdentityFunction):
    """Identity that multiplies the gradient by a constant."""

    def __init__(self, scale: float, context: Optional[nn.Context] = None) -> None:
        super().__init__(context)
        self._scale = scale

    def pass_back(self, gradients: Gradients, target: nn.NdArray, accumulate: bool) -> None:
        self.pass_gradient(gradients[0], target, self._scale, accumulate=accumulate)


class ScaledLoss(TrackedFunction):
    """Identity where a tracked backward pass starts with S0."""

    def connect(self, arriving: Dict[int, ScalePoint], node: Node, plan: GraphPlan) -> None:
        if arriving:
            raise ValueError(
                "x has been scaled already: loss_scaling(x, tracker) was applied to a part of it"
            )

    def pass_back(self, gradients: Gradients, target: nn.NdArray, accumulate: bool) -> None:
        scale = self.tracker.start_pass()
        self.point.set(scale)
        self.pass_gradient(gradients[0], target, scale, accumulate=accumulate)
