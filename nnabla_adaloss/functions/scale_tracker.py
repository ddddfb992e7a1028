# SPDX-License-Identifier: Apache-2.0
"""Accumulated scale S of every gradient in a graph with scaling functions, and the origin of each S.

S changes only at scaling functions. Between them it passes through all other functions, since an input
gradient is proportional to the output gradient.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from itertools import count
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union
from weakref import WeakValueDictionary

import nnabla as nn

from ..core.components import NodeStructure
from ..core.config import AdaLossConfig
from ..core.methods import LognormalRange
from ..core.validation import instance_or_none, positive_number
from ..graph.description import type_name_of
from ..graph.graph import Graph
from ..graph.plan import GraphPlan
from ..monitor.audience import audience_of
from .ada_loss import AdaLoss
from .identity import IdentityFunction

Points = Dict[int, int]
"""Points (numbers of places where S is set), by output of a function or by position of a variable."""

Redirected = Dict[Tuple[int, int], int]
"""Points of gradients with a scale of their own, by number of the function that writes them and position."""

# Shared, because creating a configuration takes longer than creating a function.
_DEFAULT = AdaLossConfig().for_storage(None)

UNSCALED_POINT = 0
"""Point of all unscaled gradients."""


class ScaleTracker:
    """Shared state of the scaling functions of one graph: configuration, S0, and each gradient's scale S.

    `loss_scaling(loss, tracker)` ends the graph. It finds the origin of S for each scaling function, and
    refuses a graph whose gradients would be wrong.

    A tracker serves one loss at a time; a graph that is rebuilt in each iteration keeps its tracker.

    Args:
        config: how scales are computed and bounded; None for `AdaLossConfig()`.
        scale: S0, the factor of the loss gradient. May be set between iterations.
        monitors: `on_layer_scaled` receives the scale of each layer; its `look` shows no arrays.

    Attributes:
        config: the configuration.
        found_inf: True if the last backward found an infinity or a NaN in a parameter's gradient; then skip
            the update and lower `scale`.
        layer_scales: alpha of each layer in the last backward, by layer name.
        accumulated_scales: the scale S on each layer's input gradient in the last backward, by layer name.

    Raises:
        TypeError: `config` is not an `AdaLossConfig`, or `scale` is not a number.
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
        checked = instance_or_none("config", config, AdaLossConfig)
        self.config = _DEFAULT if checked is None else checked.for_storage(None)
        if self.config.delay == 1:
            raise ValueError("config.delay is 1, but functions compute a scale where they apply it: use 0")
        self.scale = scale
        self._audience = audience_of(monitors) or ()
        # State of layers whose alpha the method of `config` computes.
        self.ada_loss = AdaLoss(self.config, self._audience)
        self.found_inf = False
        self.is_shared = True  # False: it belongs to a single function
        self.iteration = -1  # number of the last backward pass
        self.new_point = count(UNSCALED_POINT + 1).__next__
        # S of the last backward pass, by point.
        self._scales: Dict[int, float] = {}
        self.layer_scales: Dict[str, float] = {}
        self.accumulated_scales: Dict[str, float] = {}
        # Functions by hash, held weakly, since a later graph may reuse the addresses of a deleted one.
        self.functions: WeakValueDictionary[int, ScaledFunction] = WeakValueDictionary()

    @property
    def scale(self) -> float:
        """S0, the factor of the loss gradient (together with `config.init_scale`)."""
        return self._scale

    @scale.setter
    def scale(self, value: float) -> None:
        self._scale = positive_number("scale", value)

    @cached_property
    def lognormal_ada_loss(self) -> AdaLoss:
        """State of casts whose gradient is assumed to be lognormally distributed."""
        lognormal = replace(self.config, loss_scale_method=LognormalRange(self.config.n_uf_threshold))
        return AdaLoss(lognormal, self._audience)

    def start_pass(self) -> float:
        """Start a backward pass at the loss and return S0."""
        self.iteration += 1
        self._scales = {UNSCALED_POINT: 1.0}
        self.layer_scales, self.accumulated_scales = {}, {}
        self.found_inf = False
        return self.scale * self.config.init_scale

    def scale_at(self, point: Optional[int]) -> float:
        """S at a point; RuntimeError unless it was set in this backward pass."""
        if point not in self._scales:
            raise RuntimeError(
                "the scale of a gradient is unknown: backward did not start at the Variable that the last "
                "loss_scaling(loss, tracker) returned"
            )
        return self._scales[point]

    def set_scale(self, point: int, value: float) -> None:
        """Set S at a point for this backward pass; RuntimeError if it is set already."""
        if point in self._scales:
            raise RuntimeError(
                "a scaling function ran twice in one backward pass: start backward at the Variable that "
                "loss_scaling(loss, tracker) returned"
            )
        self._scales[point] = value

    def connect(self, loss: nn.Variable) -> None:
        """Connect each scaling function to the origin of its S; ValueError if a gradient would be wrong."""
        graph = Graph(loss)
        plan = GraphPlan(graph, self.config.selection)
        # Points of the variables whose functions come next, in the order in which backward reached them.
        points: Points = {}
        redirected: Redirected = {}
        for node in plan.nodes:
            reached = [position for position in points if position in node.outputs]
            arriving = {node.outputs.index(position): points.pop(position) for position in reached}
            function = self.functions.get(hash(graph.functions[node.number]))
            if function is None:
                passed = _passed_on(node, list(arriving.values()))
            else:
                redirected.update(function.connect(arriving, node, graph, plan))
                passed = function.passed
            if passed != UNSCALED_POINT and node.leaves:
                raise ValueError(
                    f"{node.type_name} ({node.label}) would leave a scaled gradient in its input of shape "
                    f"{graph.variables[node.leaves[0]].shape}, which has need_grad=True: pass "
                    "unscale(w, tracker) in place of w"
                )
            for position in node.inputs:
                point = redirected.get((node.number, position), passed)
                if points.setdefault(position, point) != point:
                    variable = graph.variables[position]
                    kind = type_name_of(variable.parent.info.type_name)
                    raise ValueError(
                        f"the output of {kind}, of shape {variable.shape}, feeds functions whose "
                        "gradients carry different scales: give each an output of branch(x, n, tracker)"
                    )


def tracker_of(scale: Union[float, ScaleTracker]) -> ScaleTracker:
    """Return the given tracker, or make one for a number: then each backward of the function is a pass."""
    if isinstance(scale, ScaleTracker):
        return scale
    own = ScaleTracker(scale=scale)
    own.is_shared = False
    return own


def _passed_on(node: NodeStructure, arriving: List[int]) -> int:
    """Point of the gradients that a function passes on unchanged."""
    if any(point != arriving[0] for point in arriving):
        raise ValueError(
            f"the gradients of the outputs of {node.type_name} ({node.label}) carry different scales: "
            "put the same adaptive_loss_scaling layers, or none, after all of them"
        )
    if arriving[0] != UNSCALED_POINT and not node.linear:
        raise ValueError(
            f"{node.type_name} ({node.label}) would clip or replace a scaled gradient: "
            "apply it before unscale, or let AdaptiveLossScaling run the graph"
        )
    return arriving[0]


class ScaledFunction(IdentityFunction):
    """Identity function that uses or changes the scale S of the arriving gradient."""

    def __init__(
        self, tracker: ScaleTracker, context: Optional[nn.Context] = None, outputs: int = 1, name: str = ""
    ) -> None:
        super().__init__(context, outputs, name)
        self.tracker = tracker
        # Points of the gradient to which this function's scale applies, and of its own input gradient.
        self.point = self.passed = tracker.new_point()
        self.label = self.name  # the name for reports of its scale
        # Point of the gradient of each output that leads to the loss, in the order of backward.
        self.arriving: Points = {}

    def connect(self, arriving: Points, node: NodeStructure, graph: Graph, plan: GraphPlan) -> Redirected:
        """Store the origin of S; return gradients that other functions write with this one's scale."""
        self.arriving, self.label = arriving, node.label
        return {}

    def arriving_scale(self) -> float:
        """S of the gradient of the only output; RuntimeError if it is unknown."""
        if self.tracker.is_shared:
            return self.tracker.scale_at(self.arriving.get(0))
        return self.tracker.start_pass()

    def apply(self, x: Any) -> Any:
        """Compute the output or outputs for `x`; with a Variable, add the function to the shared tracker."""
        y = self(x)
        if self.tracker.is_shared and isinstance(x, nn.Variable):
            self.tracker.functions[hash((y[0] if isinstance(y, tuple) else y).parent)] = self
        return y
