# SPDX-License-Identifier: Apache-2.0
"""Scales for single gradients, computed in backward: for a layer's input, or for a cast."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any, Callable, Optional, Sequence, Tuple, Union

import nnabla as nn

from ..core.components import NodeStructure, ScaledInput
from ..core.config import AdaLossConfig
from ..core.methods import Needs
from ..core.validation import boolean, instance
from ..graph.description import type_name_of
from ..graph.functions import properties_of
from ..graph.graph import Graph
from ..graph.plan import GraphPlan
from ..kernels.arrays import as_float32
from .ada_loss import AdaLoss
from .identity import Array, Gradients, IdentityFunction, check_array
from .loss_scaling import Unscale
from .scale_tracker import Points, Redirected, ScaledFunction, ScaleTracker

Layout = Tuple[ScaledInput, Callable[[Any, Any], Tuple[Any, Any]]]
"""Scaled input of a layer, and a function that makes its g and w matrices (N, C) and (C, M)."""


def adaptive_loss_scaling(
    x: Array,
    w: Array,
    config: Union[ScaleTracker, AdaLossConfig],
    *,
    monitors: Sequence[Any] = (),
    ctx: Optional[nn.Context] = None,
) -> Array:
    """Return `x`, the output of a layer with weight `w`, with the layer's input gradient scaled in backward.

    It follows the layer, where the output gradient g arrives first:

        v = unscale(w, tracker)
        y = adaptive_loss_scaling(F.affine(h, v, unscale(b, tracker)), v, tracker)

    In backward `tracker.config` computes alpha from g and `w`, and the layer multiplies g by alpha * w: the
    input gradient is scaled before it is stored. The gradients of weight and bias come from g without alpha;
    they carry S, the input gradient S * alpha. Alpha is applied to the copy of the weight that `unscale`
    made.

    With a configuration instead of a tracker nothing is tracked: `w` is any array, and the arriving gradient
    is multiplied by alpha. `monitors` receive each alpha.

    Args:
        x: output of Affine, a convolution or a deconvolution that was given `w`; any shape, float32 or
            float16. Use the result instead of `x` everywhere. An NdArray is copied: there is no backward.
        w: the result of `unscale(weight, tracker)`, one for each layer, also where layers share a weight.
        config: the tracker of the graph. It provides S, and K, the fan-in, from the layer's shapes. Or an
            `AdaLossConfig`, see above; then K is that of the layer that computed `x` with `w`, or the product
            of w's dimensions except the first where there is none.
        monitors: with a configuration, their `on_layer_scaled` receives each alpha. A tracker has its own.
        ctx: context to run in; None for the current one.

    Returns:
        A value of the type, shape and dtype of `x`.

    Raises:
        TypeError: `x` and `w` are not both Variables or both NdArrays, or `config` is neither a
            `ScaleTracker` nor an `AdaLossConfig`.
        ValueError: `w` is not such an output, or is another layer's too, or `x` is not the output of a layer
            with it, or monitors are given besides a tracker.
        RuntimeError: backward did not start at the tracker's loss; nnabla raises a SystemError instead.

    Source: Zhao et al. 2019 (arXiv 1910.12385), algorithm 1.

    Example:
        >>> import numpy as np, nnabla as nn, nnabla.functions as F, nnabla.parametric_functions as PF
        >>> from nnabla_adaloss import ScaleTracker, adaptive_loss_scaling, loss_scaling, unscale
        >>> tracker = ScaleTracker(scale=8.0)
        >>> def affine(h, n, name):
        ...     def unscaled(p):
        ...         return unscale(p, tracker)
        ...     y = PF.affine(h, n, name=name, apply_w=unscaled, apply_b=unscaled)
        ...     return adaptive_loss_scaling(y, y.parent.inputs[1], tracker)
        >>> x = nn.Variable.from_numpy_array(np.ones((4, 3), np.float32))
        >>> loss = loss_scaling(F.mean(1e-6 * affine(affine(x, 5, "a"), 2, "b")), tracker)
        >>> loss.forward()
        >>> loss.backward()
        >>> tracker.layer_scales
        {'b/affine': 16.0}
    """
    check_array("x", x)
    check_array("w", w)
    if not isinstance(config, (AdaLossConfig, ScaleTracker)):
        raise TypeError(f"config must be a ScaleTracker or an AdaLossConfig, not {type(config).__name__}")
    if monitors and isinstance(config, ScaleTracker):
        raise ValueError("monitors are those of the tracker: give them to ScaleTracker(monitors=...)")
    if isinstance(x, nn.NdArray):
        return IdentityFunction(ctx)(x)
    if isinstance(w, nn.NdArray):
        raise TypeError("w must be an nnabla.Variable, like x: the result of unscale(weight, tracker)")
    if isinstance(config, ScaleTracker):
        return ScaledLayer(x, w, config, ctx).apply(x)
    # Nothing is tracked: the gradient arrives with S = 1.
    own = ScaleTracker(replace(config, init_scale=1.0, delay=0), 1.0, monitors)
    own.is_shared = False
    layout = _layout_of(x, w, or_affine=True)
    return GradientScaling("AdaptiveGradientScale", own, own.ada_loss, ctx, w, layout).apply(x)


def cast_loss_scaling(
    x: Array, tracker: ScaleTracker, *, lognormal: bool = False, ctx: Optional[nn.Context] = None
) -> Array:
    """Return `x`, with its gradient multiplied in backward by a scale computed from that gradient alone.

    Use it where a gradient is about to be stored in fewer bits. The scale becomes part of S, so that
    `unscale` removes it.

    Args:
        x: Variable or NdArray of any shape, float32 or float16 (others are copied as float32). An NdArray is
            copied: there is no backward.
        tracker: the tracker of the graph; its `config` determines how the scale is computed.
        lognormal: assume lognormally distributed gradient magnitudes, instead of `config.loss_scale_method`.
            The logarithms are taken in NumPy: on a GPU this copies the gradient to the host.
        ctx: context to run in; None for the current one.

    Returns:
        A value of the type, shape and dtype of `x`.

    Raises:
        TypeError: `x` is not a Variable or NdArray, `tracker` not a `ScaleTracker`, or `lognormal` not a
            boolean.
        RuntimeError: backward did not start at the tracker's loss; nnabla raises a SystemError instead.

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
    ada_loss = tracker.lognormal_ada_loss if lognormal else tracker.ada_loss
    return GradientScaling("CastLossScaling", tracker, ada_loss, ctx).apply(x)


def _as_matrices(fan_in: float) -> Layout:
    """Layout of a gradient and a weight, if any, that are matrices already."""
    return ScaledInput(input=0, weight=1, fan_in=fan_in, fan_in_bound=fan_in), lambda g, w: (g, w)


def _layout_of(x: nn.Variable, w: nn.Variable, or_affine: bool = False) -> Layout:
    """Layout of the layer that computed `x` with `w`; without one that of an affine layer, or ValueError."""
    layer = x.parent
    product = None if layer is None else properties_of(layer.info.type_name).product
    if product is not None:
        args, inputs = layer.info.args, layer.inputs
        for scaled_input in product.scaled_inputs(args, [v.shape for v in inputs], x.shape):
            if inputs[scaled_input.weight] == w:
                return scaled_input, partial(product.matrices, args=args, scaled_input=scaled_input)
    if or_affine:
        return _as_matrices(float(math.prod(w.shape[1:])))
    if layer is None:
        raise ValueError("x is computed by no function; pass the output of a layer, such as F.affine(h, w)")
    raise ValueError(
        f"x is the output of {type_name_of(layer.info.type_name)}, which does not multiply by w; pass "
        "the output of the layer itself (not of its activation), and as w the weight that the layer was given"
    )


class GradientScaling(ScaledFunction):
    """Identity that multiplies the gradient by alpha, computed from it and from a weight, if any."""

    def __init__(
        self,
        name: str,  # of the type of function; "": that of the class
        tracker: ScaleTracker,
        ada_loss: AdaLoss,
        context: Optional[nn.Context] = None,
        w: Optional[nn.Variable] = None,
        layout: Optional[Layout] = None,
    ) -> None:
        super().__init__(tracker, context, name=name)
        self._ada_loss, self._w = ada_loss, w
        self._scaled_input, self._matrices = layout or _as_matrices(fan_in=1.0)

    def pass_back(self, gradients: Gradients, target: nn.NdArray, accumulate: bool) -> None:
        w = None if self._w is None else as_float32(self._w.data, nn.NdArray(self._w.shape))
        alpha = self.alpha(self.label, gradients[0], w)
        self.pass_on(gradients[0], target, alpha, accumulate=accumulate)

    def alpha(self, layer: str, g: nn.NdArray, w: Optional[nn.NdArray], w_max: float = math.inf) -> float:
        """Compute and report alpha of a layer; nothing is multiplied yet."""
        scale, arrays = self.arriving_scale(), (g, w)
        if self._ada_loss.config.method.needs is Needs.ARRAYS:
            arrays = self._matrices(g.data, None if w is None else w.data)
        alpha = self._ada_loss.loss_scale(
            layer,
            *arrays,
            fan_in=self._scaled_input.fan_in,
            fan_in_bound=self._scaled_input.fan_in_bound,
            previous_scale=scale,
            iteration=self.tracker.iteration,
            g_statistics=self.statistics(g),
            weight_statistics=None if w is None else self.statistics(w),
            weight_max=w_max,
        )
        self.tracker.set_scale(self.point, scale * alpha)
        self.tracker.layer_scales[layer] = alpha
        self.tracker.accumulated_scales[layer] = scale * alpha
        return alpha


class ScaledLayer(GradientScaling):
    """Identity on a layer's output that scales the layer's copy of its weight in backward."""

    def __init__(
        self, x: nn.Variable, w: nn.Variable, tracker: ScaleTracker, context: Optional[nn.Context] = None
    ) -> None:
        super().__init__("", tracker, tracker.ada_loss, context, layout=_layout_of(x, w))
        copier = None if w.parent is None else tracker.functions.get(hash(w.parent))
        if not isinstance(copier, Unscale):
            raise ValueError("w must be the result of unscale(weight, tracker): this tracker's copy to scale")
        if copier.is_scaled:
            raise ValueError("w is scaled by another layer: call unscale(weight, tracker) for each layer")
        copier.is_scaled = True
        self._x, self._v, self._copier, self._layer = x, w, copier, ""

    def connect(self, arriving: Points, node: NodeStructure, graph: Graph, plan: GraphPlan) -> Redirected:
        """Store the layer's name; a layer without input gradient, or an excluded one, has none."""
        super().connect(arriving, node, graph, plan)
        for name, v, remedy in (
            ("x", self._x, "use the result of adaptive_loss_scaling"),
            ("w", self._v, "call unscale for each use of a weight"),
        ):
            if len(plan.readers.get(graph.positions[hash(v)], ())) > 1:
                raise ValueError(f"{name}, of shape {v.shape}, feeds a function besides: {remedy}")
        self.passed, self._layer = arriving[0], ""  # alpha is applied by the layer
        number, weight = graph.numbers[hash(self._x.parent)], graph.positions[hash(self._v)]
        for layer_input in plan.by_number[number].layer_inputs:
            if layer_input.weight == weight:
                self._layer = layer_input.layer
                return {(number, layer_input.input): self.point}
        return {}

    def pass_back(self, gradients: Gradients, target: nn.NdArray, accumulate: bool) -> None:
        if self._layer:
            copy = self._v.data
            self._copier.scale_copy(copy, 1.0)
            alpha = self.alpha(self._layer, gradients[0], copy, self.tracker.config.range.u_max)
            self._copier.scale_copy(copy, alpha)
        self.pass_on(gradients[0], target, accumulate=accumulate)
