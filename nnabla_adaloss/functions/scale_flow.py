# SPDX-License-Identifier: Apache-2.0
"""Where the scale of every gradient comes from, found once, before the first backward.

S changes only at scaling functions. Between them it passes through whatever is there, since an input gradient
is proportional to the output gradient.
"""

from __future__ import annotations

from typing import Dict, List, Tuple

import nnabla as nn

from ..graph.node import Node
from ..graph.plan import GraphPlan
from .scale_tracker import ScalePoint, ScaleTracker, TrackedFunction


class ScaleFlow:
    """Follows S from what `loss_scaling` returned to the parameters, and connects the scaling functions;
    ValueError where some gradient would come out wrong.
    """

    def __init__(self, loss: nn.Variable, tracker: ScaleTracker) -> None:
        self._unit, self._plan = tracker.unit, GraphPlan(loss, tracker.config.selection)
        # By variable key, in the order in which backward reaches the variables.
        self._points: Dict[int, ScalePoint] = {}
        self._redirected: Dict[Tuple[int, int], ScalePoint] = {}
        private: List[Tuple[nn.Variable, str]] = []
        for node in self._plan.nodes.values():
            function = tracker.function(node.function_key)
            if function is not None:
                self._connect(node, function)
                private += function.private
            else:
                self._pass_through(node)
        for variable, message in private:
            if len(self._plan.readers.get(hash(variable), ())) > 1:
                raise ValueError(message)

    def _connect(self, node: Node, function: TrackedFunction) -> None:
        if function.behind is not self._unit:
            self._refuse_leaf(node)
        function.connect(self._arriving(node), node, self._plan)
        self._redirected.update(function.redirected)
        for v, key in zip(node.inputs, node.input_keys):
            self._reach(v, key, function.behind)

    def _arriving(self, node: Node) -> Dict[int, ScalePoint]:
        if node.single is not None:
            return {0: self._points[node.single]} if node.single in self._points else {}
        index = {key: i for i, key in enumerate(node.output_keys)}
        return {index[key]: point for key, point in self._points.items() if key in index}

    def _pass_through(self, node: Node) -> None:
        points = list(self._arriving(node).values())
        if any(point is not points[0] for point in points):
            raise ValueError(
                f"the gradients of the outputs of {node.type_name} ({node.label}) carry different scales: "
                "put the same adaptive_loss_scaling layers, or none, behind all of them"
            )
        if points[0] is not self._unit:
            if node.non_homogeneous:
                raise ValueError(
                    f"{node.type_name} ({node.label}) would clip or replace a scaled gradient: "
                    "apply it to what unscale is given, or let AdaptiveLossScaling run the graph"
                )
            self._refuse_leaf(node)
        for v, key in zip(node.inputs, node.input_keys):
            self._reach(v, key, self._redirected.get((node.function_key, key), points[0]))

    def _reach(self, variable: nn.Variable, key: int, point: ScalePoint) -> None:
        if self._points.setdefault(key, point) is not point:
            raise ValueError(
                f"the output of {variable.parent.info.type_name}, of shape {variable.shape}, feeds functions "
                "whose gradients carry different scales: give each an output of branch(x, n, tracker)"
            )

    def _refuse_leaf(self, node: Node) -> None:
        for leaf in node.leaves:
            raise ValueError(
                f"{node.type_name} ({node.label}) would leave a scaled gradient in its input of shape "
                f"{leaf.shape}, which has need_grad=True: pass unscale(w, tracker) in place of w"
            )
