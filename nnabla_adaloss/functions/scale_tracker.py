# SPDX-License-Identifier: Apache-2.0
"""The accumulated scale S of every gradient in a graph that scales itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Dict, List, Optional, Sequence, Tuple
from weakref import WeakValueDictionary

import nnabla as nn

from ..core.config import AdaLossConfig
from ..core.methods import LognormalRange
from ..core.validation import instance_or_none, positive_number
from ..graph.node import Node
from ..graph.plan import GraphPlan
from ..kernels import select_kernels
from ..monitor import audience_of
from .ada_loss import NNablaAdaLoss
from .identity import IdentityFunction


class ScalePoint:
    """The scale S of the gradients behind one function, valid in the backward pass that set it."""

    __slots__ = ("_pass", "_scale", "_tracker")

    def __init__(self, tracker: ScaleTracker) -> None:
        self._tracker = tracker
        self._pass = 0
        self._scale = 1.0

    @property
    def scale(self) -> float:
        """S; RuntimeError unless it was set in this backward pass."""
        if self._pass != self._tracker.passes or not self._pass:
            raise RuntimeError(
                "the scale of a gradient is unknown: backward did not start at the Variable that the last "
                "loss_scaling(loss, tracker) returned"
            )
        return self._scale

    def set(self, value: float) -> None:
        """Note S for this backward pass; RuntimeError when that was done already."""
        if self._pass == self._tracker.passes:
            raise RuntimeError(
                "a scaling function ran twice in one backward pass: start backward at the Variable that "
                "loss_scaling(loss, tracker) returned"
            )
        self._pass = self._tracker.passes
        self._scale = value


class ScaleTracker:
    """What the scaling functions of one graph share: configuration, S0, and each gradient's scale S.

    `loss_scaling(loss, tracker)` ends the graph. It finds for each scaling function where its S comes from,
    and refuses a graph whose gradients would come out wrong: a parameter without `unscale`, a variable that
    feeds functions at different scales without `branch`.

    A tracker serves one loss at a time; a graph that is built anew in each iteration keeps its tracker.

    Args:
        config: how scales are computed and bounded; None for `AdaLossConfig()`.
        scale: S0, what the loss gradient is multiplied by. May be set between iterations.
        monitors: `on_layer_scaled` receives the scale of each layer; its `look` shows no arrays.

    Attributes:
        config: the configuration.
        unit: S of every gradient that has been unscaled.
        found_inf: whether the last backward met an infinity or a NaN in a parameter's gradient. Such an
            update is to be skipped, and `scale` lowered.

    Raises:
        TypeError: `config` is no `AdaLossConfig`, or `scale` is not a number.
        ValueError: `scale` is not positive and finite, or `config.delay` is 1.

    Example:
        >>> import numpy as np, nnabla as nn, nnabla.functions as F
        >>> from nnabla_adaloss import ScaleTracker, loss_scaling, unscale
        >>> x = nn.Variable.from_numpy_array(np.ones((4, 3), np.float32))
        >>> w = nn.Variable.from_numpy_array(np.ones((3, 2), np.float32), need_grad=True)
        >>> tracker = ScaleTracker(scale=128.0)
        >>> loss = loss_scaling(F.mean(F.affine(x, unscale(w, tracker))), tracker)
        >>> loss.forward()
        >>> w.grad.zero()
        >>> loss.backward()
        >>> w.g[0]
        array([0.5, 0.5], dtype=float32)
    """

    def __init__(
        self, config: Optional[AdaLossConfig] = None, scale: float = 8.0, monitors: Sequence[Any] = ()
    ) -> None:
        self.config = (instance_or_none("config", config, AdaLossConfig) or AdaLossConfig()).stored_in(None)
        if self.config.delay == 1:
            raise ValueError("config.delay is 1, but functions compute a scale where they apply it: use 0")
        self.scale = scale
        self.found_inf = False
        self.passes = 0  # how many backward passes have started
        self.unit = ScalePoint(self)
        kernels = select_kernels(nn.get_current_context())
        lognormal = replace(self.config, loss_scale_method=LognormalRange(self.config.n_uf_threshold))
        audience = audience_of(monitors) or ()
        self.ada_loss = NNablaAdaLoss(self.config, kernels, audience)
        self.lognormal_ada_loss = NNablaAdaLoss(lognormal, kernels, audience)
        # Alpha and S * alpha by layer name.
        self._layers: Dict[str, Tuple[float, float]] = {}
        # Those that run in graphs, by the hash of the graph's function. Weak, since a graph that is gone
        # leaves its addresses to the next one.
        self._functions: WeakValueDictionary[int, TrackedFunction] = WeakValueDictionary()

    @property
    def scale(self) -> float:
        """S0, what the loss gradient is multiplied by (together with `config.init_scale`)."""
        return self._scale

    @scale.setter
    def scale(self, value: float) -> None:
        self._scale = positive_number("scale", value)

    @property
    def layer_scales(self) -> Dict[str, float]:
        """Alpha of each layer in the last backward, by layer name."""
        return {layer: alpha for layer, (alpha, _) in self._layers.items()}

    @property
    def accumulated_scales(self) -> Dict[str, float]:
        """The scale S on each layer's input gradient in the last backward, by layer name."""
        return {layer: scale for layer, (_, scale) in self._layers.items()}

    @property
    def iteration(self) -> int:
        """Number of the running pass, from 0."""
        return self.passes - 1

    def start_pass(self) -> float:
        """Start a backward pass at the loss; returns S0."""
        self.passes += 1
        self.unit.set(1.0)
        self._layers = {}
        self.found_inf = False
        return self.scale * self.config.init_scale

    def note_layer(self, layer: str, alpha: float, accumulated: float) -> None:
        """Keep what a layer applied in this pass."""
        self._layers[layer] = (alpha, accumulated)

    def add(self, function: TrackedFunction, output: nn.Variable) -> None:
        """Take up a function that has become part of a graph."""
        self._functions[hash(output.parent)] = function

    def function(self, key: int) -> Optional[TrackedFunction]:
        """The tracked function that runs as the graph's function of this hash, if one does."""
        return self._functions.get(key)


class TrackedFunction(IdentityFunction):
    """An identity function that knows the scale of the gradients that arrive."""

    def __init__(self, tracker: ScaleTracker, context: Optional[nn.Context] = None, outputs: int = 1) -> None:
        super().__init__(context, outputs)
        self.tracker = tracker
        # S of the gradient that this function's scale applies to, and of what it hands on itself.
        self.point = self.behind = ScalePoint(tracker)
        self.label = ""  # the name under which its scale is reported
        # By output where its S comes from, in the order of backward; only outputs that lead to the loss.
        self.arriving: Dict[int, ScalePoint] = {}
        # S of what other functions write, by keys of function and variable.
        self.redirected: Dict[Tuple[int, int], ScalePoint] = {}
        # Variables that may feed one function only, and what to tell the user if they feed more.
        self.private: List[Tuple[nn.Variable, str]] = []

    def connect(self, arriving: Dict[int, ScalePoint], node: Node, plan: GraphPlan) -> None:
        """Learn where S comes from, and what the functions around are."""
        self.arriving, self.label = arriving, node.label

    def arriving_scale(self) -> float:
        """S of the gradient of the only output; RuntimeError when it is unknown."""
        return self.arriving.get(0, ScalePoint(self.tracker)).scale

    def scale_layer(
        self,
        ada_loss: NNablaAdaLoss,
        layer: str,
        g: nn.NdArray,
        weight: Optional[nn.NdArray],
        *,
        fan_in: float = 1.0,
        fan_in_bound: float = 1.0,
    ) -> float:
        """Alpha of a layer, noted under its name; nothing is multiplied yet."""
        scale = self.arriving_scale()
        alpha = ada_loss.loss_scale(
            layer,
            g,
            weight,
            fan_in=fan_in,
            fan_in_bound=fan_in_bound,
            previous_scale=scale,
            iteration=self.tracker.iteration,
            g_statistics=self.statistics(g),
            weight_statistics=None if weight is None else self.statistics(weight),
            weight_max=self.tracker.config.range.u_max,
        )
        self.point.set(scale * alpha)
        self.tracker.note_layer(layer, alpha, scale * alpha)
        return alpha

    def apply(self, x: Any) -> Any:
        """The output, or outputs, for `x`; with a Variable, the tracker takes note of the function."""
        y = self(x)
        if isinstance(x, nn.Variable):
            self.tracker.add(self, y[0] if isinstance(y, tuple) else y)
        return y
