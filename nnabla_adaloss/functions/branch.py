# SPDX-License-Identifier: Apache-2.0
"""A fan-out whose branches may carry different scales."""

from __future__ import annotations

import math
from typing import Optional, Sequence, Tuple

import nnabla as nn

from ..core.validation import instance, positive_integer
from .identity import Array, Gradients, IdentityFunction, check_array
from .scale_tracker import ScaledFunction, ScaleTracker


def branch(
    x: Array, n: int, tracker: Optional[ScaleTracker] = None, *, ctx: Optional[nn.Context] = None
) -> Tuple[Array, ...]:
    """Copy `x` `n` times, once for each function that it feeds.

    In backward the gradients of the branches, each with the scale S of its own, are brought to one common
    scale before they are added: the largest of theirs at which the sum stays within `config.range`. They are
    added in the order in which backward computes them, as nnabla itself does.

    Args:
        x: Variable or NdArray of any shape, float32 or float16 (others are copied as float32). An NdArray is
            copied: there is no backward.
        n: number of branches, 1 or more.
        tracker: the tracker of the graph. None: scales are not tracked, and gradients are added unchanged.
        ctx: context to run in; None for the current one.

    Returns:
        A tuple of length `n`, of the type, shape and dtype of `x`. Outputs may stay unused.

    Raises:
        TypeError: `x` is not a Variable or NdArray, `n` not an integer, or `tracker` neither a `ScaleTracker`
            nor None.
        ValueError: `n` is less than 1.
        RuntimeError: backward did not start at the tracker's loss; nnabla raises a SystemError instead.

    Source: Zhao et al. 2019 (arXiv 1910.12385), on networks with branches.

    Example:
        >>> import numpy as np, nnabla as nn, nnabla.functions as F
        >>> from nnabla_adaloss import ScaleTracker, branch, loss_scaling, unscale
        >>> tracker = ScaleTracker()
        >>> w = nn.Variable.from_numpy_array(np.array([3.0], np.float32), need_grad=True)
        >>> a, b = branch(unscale(w, tracker), 2, tracker)
        >>> loss = loss_scaling(F.sum(a * b), tracker)
        >>> loss.forward()
        >>> w.grad.zero()
        >>> loss.backward()
        >>> float(w.g[0])
        6.0
    """
    check_array("x", x)
    positive_integer("n", n)
    if tracker is None:
        outputs = IdentityFunction(ctx, int(n))(x)
    else:
        instance("tracker", tracker, ScaleTracker)
        outputs = Branch(tracker, ctx, int(n)).apply(x)
    return outputs if isinstance(outputs, tuple) else (outputs,)


class Branch(ScaledFunction):
    """Identity with several outputs."""

    def pass_back(self, gradients: Gradients, target: nn.NdArray, accumulate: bool) -> None:
        arriving = [(gradients[i], self.tracker.scale_at(point)) for i, point in self.arriving.items()]
        common = arriving[0][1]
        if any(scale != common for _, scale in arriving):
            branches = [(scale, self.statistics(gradient).abs_max) for gradient, scale in arriving]
            common = common_scale(branches, u_max=self.tracker.config.range.u_max)
        self.tracker.set_scale(self.point, common)
        for gradient, scale in arriving:
            self.pass_gradient(gradient, target, common / scale, accumulate=accumulate)
            accumulate = True


def common_scale(branches: Sequence[Tuple[float, float]], *, u_max: float) -> float:
    """Largest scale s of `branches` with sum_i max|g_i| * (s / scale_i) <= u_max, or the smallest."""
    # A branch whose max|g| is not finite does not count: its update is skipped anyway.
    scales = {scale for scale, _ in branches}
    smallest = min(scales)
    # The sum is proportional to s, so one sum suffices, at the smallest s, where no term is enlarged.
    total = sum(abs_max * (smallest / scale) for scale, abs_max in branches if math.isfinite(abs_max))
    return max((scale for scale in scales if total * (scale / smallest) <= u_max), default=smallest)
