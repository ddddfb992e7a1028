# SPDX-License-Identifier: Apache-2.0
"""What functions share whose backward depends on the accumulated scale S."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

import nnabla as nn

from ..graph.node import Node
from ..graph.plan import GraphPlan
from .identity import IdentityFunction
from .scale_point import ScalePoint
from .scale_tracker import ScaleTracker


class TrackedFunction(IdentityFunction):
    """An identity function that knows the scale of the gradients that arrive.

    Attributes:
        tracker: what the functions of a graph share.
        point: S of the gradient that this function's scale applies to.
        arriving: by output where its S comes from, in the order in which backward reaches the outputs;
            outputs that do not lead to the loss are absent.
        redirected: S of what other functions write, by keys of function and variable.
        private: variables that may feed one function only, and what to tell the user if they feed more.
    """

    def __init__(self, tracker: ScaleTracker, context: Optional[nn.Context] = None) -> None:
        super().__init__(context)
        self.tracker = tracker
        self.point = tracker.new_point()
        self.arriving: Dict[int, ScalePoint] = {}
        self.redirected: Dict[Tuple[int, int], ScalePoint] = {}
        self.private: List[Tuple[nn.Variable, str]] = []

    @property
    def behind(self) -> ScalePoint:
        """S of what this function hands on itself."""
        return self.point

    def connect(self, arriving: Dict[int, ScalePoint], node: Node, plan: GraphPlan) -> None:
        """Learn where S comes from, and what the functions around are."""
        self.arriving = arriving

    def arriving_scale(self) -> float:
        """S of the gradient of the only output; RuntimeError when it is unknown."""
        return self.arriving.get(0, self.tracker.new_point()).scale

    def apply(self, x: Any) -> Any:
        """The output, or outputs, for `x`; with a Variable, the tracker takes note of the function."""
        y = self(x)
        if isinstance(x, nn.Variable):
            self.tracker.add(self, y[0] if isinstance(y, tuple) else y)
        return y
