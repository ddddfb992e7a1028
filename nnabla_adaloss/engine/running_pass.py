# SPDX-License-Identifier: Apache-2.0
"""What those who choose scales may ask of the backward pass that is running."""

from __future__ import annotations

from typing import Dict, Optional, Protocol

import nnabla as nn

from ..graph.plan import GraphPlan
from .emulated_storage import EmulatedStorage
from .gradient_ranges import GradientRanges
from .statistics_source import StatisticsSource


class RunningPass(Protocol):
    """A backward pass between two functions.

    Attributes:
        plan: the graph.
        statistics: where the statistics of arrays come from.
        storage: an emulated storage, or None.
        scales: the scale of each gradient so far, by variable key.
        u_max: the largest magnitude of the storage format; of the narrowest, where layers differ.
        ranges: the range of each gradient, where layers differ; None: they do not.
        iteration: number of the iteration.
        attempt: number of the pass within the iteration.
        start_scale: the scale that the loss gradient starts with when nothing is known.
        lift: how far the loss section has raised the gradient above that.
    """

    plan: GraphPlan
    statistics: StatisticsSource
    storage: Optional[EmulatedStorage]
    scales: Dict[int, float]
    u_max: float
    ranges: Optional[GradientRanges]
    iteration: int
    attempt: int
    start_scale: float
    lift: float

    def bring_to(self, variable: nn.Variable, key: int, target: float) -> None:
        """Multiply a gradient in place, so that it carries the scale `target`."""

    def match(self, variable: nn.Variable, key: int, target: float) -> None:
        """Likewise, because it meets another branch that carries `target`; it is counted."""

    def abs_max(self, variable: nn.Variable, key: int) -> float:
        """The largest magnitude of a gradient as stored; the largest there is while it is not known."""
