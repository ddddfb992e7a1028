# SPDX-License-Identifier: Apache-2.0
"""A scale from the gradient alone, for functions without a weight, such as a cast to a narrow format."""

from __future__ import annotations

from typing import Optional

import nnabla as nn

from ..core.validation import boolean, instance
from .identity import Array, Gradients, IdentityFunction, check_array
from .scale_tracker import ScaleTracker, TrackedFunction


def cast_loss_scaling(
    x: Array, tracker: ScaleTracker, *, lognormal: bool = False, ctx: Optional[nn.Context] = None
) -> Array:
    """`x`, whose gradient is multiplied in backward by a scale computed from that gradient alone.

    It stands where a gradient is about to be stored in fewer bits. The scale joins S, so that every `unscale`
    behind takes it back.

    Args:
        x: Variable or NdArray of any shape, float32 or float16 (others are copied as float32). An NdArray is
            copied: there is no backward.
        tracker: the tracker of the graph; its `config` says how the scale is computed.
        lognormal: take the magnitudes of the gradient for lognormally distributed, in place of
            `config.loss_scale_method`. The logarithms are taken in NumPy: on a GPU this copies the gradient
            to the host.
        ctx: context to run in; None for the current one.

    Returns:
        Of the type, shape and dtype of `x`.

    Raises:
        TypeError: `x` is no Variable or NdArray, `tracker` no `ScaleTracker`, or `lognormal` no boolean.
        RuntimeError: backward did not start at the tracker's loss; nnabla hides it behind a SystemError.

    Source: Zhao et al. 2019 (arXiv 1910.12385); `get_loss_scale_by_approx_range` without a weight.

    Example:
        >>> import numpy as np, nnabla as nn, nnabla.functions as F
        >>> from nnabla_adaloss import ScaleTracker, cast_loss_scaling, loss_scaling, unscale
        >>> tracker = ScaleTracker(scale=8.0)
        >>> w = nn.Variable.from_numpy_array(np.ones(4, np.float32), need_grad=True)
        >>> weights = nn.Variable.from_numpy_array(np.array([1e-7, 2e-7, -1e-7, 3e-7], np.float32))
        >>> x = cast_loss_scaling(unscale(w, tracker), tracker, lognormal=True)
        >>> loss = loss_scaling(F.sum(x * weights), tracker)
        >>> loss.forward()
        >>> w.grad.zero()
        >>> loss.backward()
        >>> tracker.layer_scales, bool((w.g == weights.d).all())
        ({'CastLossScaling': 1.0}, True)
    """
    check_array("x", x)
    instance("tracker", tracker, ScaleTracker)
    boolean("lognormal", lognormal)
    if isinstance(x, nn.NdArray):
        return IdentityFunction(ctx)(x)
    return CastLossScaling(tracker, lognormal, ctx).apply(x)


class CastLossScaling(TrackedFunction):
    """Identity that multiplies the gradient by a scale computed from it."""

    def __init__(self, tracker: ScaleTracker, lognormal: bool, context: Optional[nn.Context] = None) -> None:
        super().__init__(tracker, context)
        self._ada_loss = tracker.lognormal_ada_loss if lognormal else tracker.ada_loss

    def pass_back(self, gradients: Gradients, target: nn.NdArray, accumulate: bool) -> None:
        alpha = self.scale_layer(self._ada_loss, self.label, gradients[0], None)
        self.pass_gradient(gradients[0], target, alpha, accumulate=accumulate)
