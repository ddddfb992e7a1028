# SPDX-License-Identifier: Apache-2.0
"""Functions of a graph for loss scaling, its inverse for gradients of parameters, and fan-outs between."""

from __future__ import annotations

import math
from typing import Any, List, Optional, Sequence, Tuple, Union

import nnabla as nn

from ..core.components import NodeStructure
from ..core.validation import instance, positive_integer
from ..graph.graph import Graph
from ..graph.plan import GraphPlan
from ..kernels.arrays import prepare_master
from .identity import Array, Gradients, IdentityFunction, check_array
from .scale_tracker import UNSCALED_POINT, Points, Redirected, ScaledFunction, ScaleTracker, tracker_of


def loss_scaling(x: Array, scale: Union[float, ScaleTracker], *, ctx: Optional[nn.Context] = None) -> Array:
    """Return `x`, with its gradient multiplied by a scale in backward.

    With a number, all gradients before `x` in the graph are `scale` times as large; `unscale(w, scale)`
    undoes it. With a `ScaleTracker`, `x` is the loss, its gradient becomes the tracker's S0, and the graph is
    checked and connected.

    Args:
        x: Variable or NdArray of any shape, float32 or float16 (others are copied as float32). An NdArray is
            copied: there is no backward.
        scale: positive and finite; a power of two keeps every bit. Or the tracker of the graph.
        ctx: context to run in; None for the current one.

    Returns:
        A value of the type, shape and dtype of `x`.

    Raises:
        TypeError: `x` is not a Variable or NdArray, or `scale` neither a number nor a tracker.
        ValueError: `scale` is not positive and finite. With a tracker also: a parameter is used without
            `unscale`, a variable feeds functions at different scales without `branch`, or a function on the
            way (clipping, Sink) does not pass a scale on.

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
    y = LossScaling(tracker, ctx, name="ScaledLoss" if tracker.is_shared else "").apply(x)
    if tracker.is_shared and isinstance(y, nn.Variable) and y.need_grad:
        tracker.connect(y)
    return y


def unscale(w: Array, scale: Union[float, ScaleTracker], *, ctx: Optional[nn.Context] = None) -> Array:
    """Return `w`, with its gradient divided by its scale in backward, in float32.

    The gradient of `w` is float32 in every context: in float16 a small one would underflow again.

    Args:
        w: parameter, or input whose gradient is wanted: Variable or NdArray of any shape, float32 or float16
            (others are copied as float32). An NdArray is copied: there is no backward.
        scale: the divisor, positive and finite. Or the tracker of the graph, which knows S where the result
            is used; then uses of a parameter at different S need an `unscale` each.
        ctx: context to run in; None for the current one.

    Returns:
        A value of the type, shape and dtype of `w`. With `nnabla.parametric_functions`, pass
        `apply_w=lambda w: unscale(w, tracker)`, and likewise `apply_b`.

    Raises:
        TypeError: `w` is not a Variable or NdArray, or `scale` neither a number nor a tracker.
        ValueError: `scale` is not positive and finite.
        RuntimeError: backward did not start at the tracker's loss; nnabla raises a SystemError instead.

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
    n = positive_integer("n", n)
    if tracker is None:
        outputs = IdentityFunction(ctx, n)(x)
    else:
        outputs = Branch(instance("tracker", tracker, ScaleTracker), ctx, n).apply(x)
    return outputs if isinstance(outputs, tuple) else (outputs,)


class LossScaling(ScaledFunction):
    """Identity at the start of a tracker's backward pass: multiplies the gradient by S0."""

    def connect(self, arriving: Points, node: NodeStructure, graph: Graph, plan: GraphPlan) -> Redirected:
        if arriving:
            raise ValueError("x is scaled already: loss_scaling(x, tracker) was applied to a part of it")
        return {}

    def pass_back(self, gradients: Gradients, target: nn.NdArray, accumulate: bool) -> None:
        scale = self.tracker.start_pass()
        self.tracker.set_scale(self.point, scale)
        self.pass_on(gradients[0], target, scale, accumulate=accumulate)


class Unscale(ScaledFunction):
    """Identity that divides the gradient by S; its output is a copy of the weight that a layer may scale."""

    def __init__(self, tracker: ScaleTracker, context: Optional[nn.Context] = None) -> None:
        super().__init__(tracker, context)
        self.passed = UNSCALED_POINT
        self.factor = 1.0  # ratio of the copy to the weight
        self.is_scaled = False  # True if a layer scales the copy

    def forward_impl(self, inputs: List[Any], outputs: List[Any]) -> None:
        self.factor = 1.0
        super().forward_impl(inputs, outputs)

    def scale_copy(self, copy: nn.NdArray, factor: float) -> None:
        """Set the copy to factor times the weight."""
        if factor != self.factor:
            self.kernels.scale_(copy, factor / self.factor)
            self.factor = factor

    def pass_back(self, gradients: Gradients, target: nn.NdArray, accumulate: bool) -> None:
        scale = self.arriving_scale()
        self.tracker.set_scale(self.point, 1.0)
        source = gradients[0]
        if not source.zeroing:
            prepare_master(target, self.kernels.context)
            accumulate = accumulate and not target.zeroing
            largest = self.kernels.unscale_add(source, target, scale, accumulate=accumulate)
            self.tracker.found_inf |= not math.isfinite(largest)
        elif not accumulate:
            # Keep it lazily zero: solvers skip a parameter without gradient.
            target.zero()


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
            self.pass_on(gradient, target, common / scale, accumulate=accumulate)
            accumulate = True


def common_scale(branches: Sequence[Tuple[float, float]], *, u_max: float) -> float:
    """Largest scale s of `branches` with sum_i max|g_i| * (s / scale_i) <= u_max, or the smallest."""
    # A branch whose max|g| is not finite does not count: its update is skipped anyway.
    scales = {scale for scale, _ in branches}
    smallest = min(scales)
    # The sum is proportional to s, so one sum suffices, at the smallest s, where no term is enlarged.
    total = sum(abs_max * (smallest / scale) for scale, abs_max in branches if math.isfinite(abs_max))
    return max((scale for scale in scales if total * (scale / smallest) <= u_max), default=smallest)
