# SPDX-License-Identifier: Apache-2.0
"""The graph of a loss as passes need it: its plan, and what is measured of its arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Sequence, Union

import nnabla as nn

from ..core.layer_selection import LayerSelection
from ..graph.names import ParameterNames
from ..graph.plan import GraphPlan
from ..kernels import Kernels, Measurements, measurements_by
from ..kernels.scratch import ScratchPool
from .emulated_storage import EmulatedStorage
from .held_scales import HeldScales
from .planned_steps import Obstacle, PlannedSteps
from .statistics_source import DelayedStatistics, ImmediateStatistics, StatisticsSource


@dataclass
class PreparedGraph:
    """A plan of the graph, and what is measured of its arrays.

    Attributes:
        plan: the plan.
        measurements: measures arrays, where statistics are those of the iteration before; else None.
        statistics: what is known of the arrays.
        held: the scales that `steps` were planned for.
        steps: how they can be applied at once, or why not.
    """

    plan: GraphPlan
    measurements: Optional[Measurements]
    statistics: StatisticsSource
    held: Optional[HeldScales] = None
    steps: Union[PlannedSteps, Obstacle, None] = None


class GraphPreparation:
    """Prepares the graph of one loss, and does so anew when the graph is not what it was.

    Args:
        loss: the loss.
        selection: which layers get a scale.
        adaptive: False when no function between the loss and the first layer may be rescaled.
        non_homogeneous: type names of further functions whose gradient is not linear in the output gradient.
        names: names of parameters, by variable key.
        kernels: passes over memory.
        pool: where scratch arrays come from.
        storage: an emulated storage, or None.
        delayed: whether statistics are those of the iteration before.
    """

    def __init__(
        self,
        loss: nn.Variable,
        selection: LayerSelection,
        *,
        adaptive: bool,
        non_homogeneous: Sequence[str],
        names: ParameterNames,
        kernels: Kernels,
        pool: ScratchPool,
        storage: Optional[EmulatedStorage],
        delayed: bool,
    ) -> None:
        self._loss, self._selection, self._names = loss, selection, names
        self._adaptive, self._non_homogeneous = adaptive, non_homogeneous
        self._kernels, self._pool, self._storage, self._delayed = kernels, pool, storage, delayed
        self._prepared: Optional[PreparedGraph] = None

    @property
    def known(self) -> Optional[PreparedGraph]:
        """The graph as it was when it was last looked at; None: nobody has."""
        return self._prepared

    def prepared(self, *, look_again: bool = False) -> PreparedGraph:
        """The graph; prepared anew when it is not what it was.

        Args:
            look_again: whether to look for changes; else it is as at the first use.
        """
        if self._prepared is None or (look_again and not self._prepared.plan.is_current):
            plan = GraphPlan(
                self._loss,
                self._selection,
                adaptive=self._adaptive,
                non_homogeneous=self._non_homogeneous,
                names=self._names,
            )
            # Per variable its gradient, as it arrives and as one branch, and its data.
            rows = 3 * len(plan.variables) + 64
            measurements = measurements_by(self._kernels, rows) if self._delayed else None
            self._prepared = PreparedGraph(plan, measurements, self.new_statistics(measurements))
        return self._prepared

    def plan(self) -> GraphPlan:
        """The plan of the graph as it is now."""
        return self.prepared(look_again=True).plan

    def drop(self) -> None:
        """Have it prepared anew."""
        self._prepared = None

    def new_statistics(self, measurements: Optional[Measurements]) -> StatisticsSource:
        """Statistics of which nothing is known yet."""
        if measurements is None:
            return ImmediateStatistics(self._kernels, self._pool, self._storage)
        return DelayedStatistics(measurements, self._pool, self._storage)
