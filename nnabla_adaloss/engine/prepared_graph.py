# SPDX-License-Identifier: Apache-2.0
"""The graph of a loss as passes need it: its plan, and what is measured of its arrays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import AbstractSet, Any, Callable, List, Mapping, Optional, Sequence, Tuple, Union

import nnabla as nn

from ..emulation.rounded_storage import RoundedStorage
from ..graph.components import Components
from ..graph.names import ParameterNames
from ..graph.plan import GraphPlan, completed_names
from ..graph.reading import GraphDescription, GraphReading
from ..graph.structure import GraphStructure, PlanOptions
from ..kernels import Kernels, Measurements, measurements_by
from ..kernels.scratch import ScratchPool
from ..undo import Undoable
from .delayed_statistics import DelayedStatistics
from .immediate_statistics import ImmediateStatistics
from .passes.hookless import HooklessSteps
from .passes.hookless_steps import FallbackReason
from .schedule import ScaleSchedule, ScheduleCache
from .shares import Share, shares_of
from .statistics import StatisticsSource

# Both losses of an adversarial network, or recurrent networks of so many lengths.
_REMEMBERED = 16


@dataclass
class KnownGraph:
    """A way in which graphs are wired; no graph itself, nor any array of it, is kept.

    Attributes:
        structure: what follows from it, and from the shapes of the last one.
        cache: the schedule in use when the network's graph was last built otherwise; or None.
        statistics: what `StatisticsSource.state` returned then; or None.
    """

    structure: GraphStructure
    cache: Optional[ScheduleCache] = None
    statistics: Optional[Sequence[Any]] = None


class KnownGraphs:
    """The ways in which the graphs of a network were built last."""

    def __init__(self) -> None:
        # The one that was used last is the last.
        self._known: List[KnownGraph] = []

    def __len__(self) -> int:
        return len(self._known)

    def of(
        self, described: GraphDescription, options: PlanOptions, leaves: Mapping[int, nn.Variable]
    ) -> KnownGraph:
        """What is known of a graph; all is found out, if none that was wired alike is remembered.

        Args:
            described: the graph.
            options: what else its structure depends on.
            leaves: its leaves, by position.

        Raises:
            ValueError: a pattern of the selection matches no layer.
        """
        for index in reversed(range(len(self._known))):
            known = self._known[index]
            found = known.structure.of_alike(described) if known.structure.options == options else None
            if found is not None:
                known.structure = found
                self._known.append(self._known.pop(index))
                return known
        known = KnownGraph(GraphStructure(described, options, [leaves[p] for p in described.kept]))
        self._known = [*self._known[1 - _REMEMBERED :], known]
        return known

    def drop_schedules(self) -> None:
        """Have scales chosen again."""
        for known in self._known:
            known.cache = None

    def forget(self) -> None:
        """Forget what was measured, too."""
        for known in self._known:
            known.cache = known.statistics = None


@dataclass
class PreparedGraph:
    """A plan of the graph, what is measured of its arrays, and the schedule in use.

    Attributes:
        known: what is kept of graphs of the same topology.
        plan: the plan.
        by_layer: whether layers separate components.
        emulated: whether a storage is emulated, which sees every gradient.
        pool: where scratch arrays come from.
        measurements: measures arrays, where statistics are those of earlier iterations; else None.
        statistics: what is known of the arrays.
        cache: the schedule in use.
        planned_for: the schedule that `steps` were planned for.
        steps: how it can be applied at once, or why not.
    """

    known: KnownGraph
    plan: GraphPlan
    by_layer: bool
    emulated: bool
    pool: ScratchPool
    measurements: Optional[Measurements]
    statistics: StatisticsSource
    cache: ScheduleCache
    planned_for: Optional[ScaleSchedule] = None
    steps: Union[HooklessSteps, FallbackReason, None] = None
    _shares: Sequence[Optional[Share]] = ()
    _shared: Tuple[AbstractSet[int], int] = (frozenset(), 0)

    @cached_property
    def components(self) -> Components:
        """The components of the graph."""
        return self.plan.structure.components(by_layer=self.by_layer)

    def built_again(self, plan: GraphPlan, storage: Optional[RoundedStorage]) -> PreparedGraph:
        """The same for another graph of the same topology.

        Args:
            plan: the plan of that graph.
            storage: its emulated storage, or None.
        """
        again = replace(self, plan=plan, planned_for=None, steps=None)
        again.statistics.bind(plan, storage)
        if plan.structure is not self.plan.structure:
            again._shares = ()
        # Of steps that do not hold for another graph, new ones are made.
        if self.steps is not None and self.steps.hold_for(plan.structure):
            again.steps, again.planned_for = self.steps, self.planned_for
        return again

    def share(self, iteration: int) -> Optional[Share]:
        """What an iteration measures that uses the schedule; None: nothing."""
        number = self.cache.share(iteration)
        if number is None:
            return None
        gradients, data = self.statistics.measured_before()
        if not self._shares or self._shared != (gradients, len(data)):
            structure, self._shared = self.plan.structure, (gradients, len(data))
            schedule = self.cache.schedule
            if schedule is not None and schedule.components is not None:
                gradients = gradients | {*structure.largest_gradients}
            shares = shares_of(structure, gradients, data, self.cache.iterations)
            if self.emulated:
                # The storage sees every gradient of every pass, but for those of functions in float.
                leaves = frozenset(structure.leaves)
                shares = [share._replace(leaves=leaves) for share in shares]
            self._shares = [share if share.last or not share.empty else None for share in shares]
        return self._shares[number]

    def measure_weights(self, iteration: int) -> None:
        """Measure the weights of an iteration's share after an update, before forward converts them."""
        share = self.share(iteration)
        if share is not None:
            self.statistics.measure_weights(share.weights)


class GraphPreparation:
    """Prepares the graph of one loss, and does so anew when the graph is not what it was.

    Args:
        read: reads the graph of the loss as it is now.
        reading: the graph.
        options: what its plan depends on, besides the graph.
        names: names of parameters, by variable key.
        more_names: asked where a parameter has none among these.
        kernels: passes over memory.
        storage: an emulated storage, or None.
        delayed: whether statistics are those of the iteration before.
        by_layer: whether layers separate components.
        new_cache: makes an empty cache of schedules.

    Attributes:
        pool: where scratch arrays come from.
        new_cache: makes an empty cache of schedules.
    """

    undone = "_prepared", "_before"

    def __init__(
        self,
        read: Callable[[], GraphReading],
        reading: GraphReading,
        options: PlanOptions,
        names: ParameterNames,
        more_names: Callable[[], ParameterNames],
        *,
        kernels: Kernels,
        storage: Optional[RoundedStorage],
        delayed: bool,
        by_layer: bool,
        new_cache: Callable[[], ScheduleCache],
    ) -> None:
        self._read, self._options = read, options
        self._names, self._more_names = names, more_names
        self._kernels, self._storage, self._delayed, self._by_layer = kernels, storage, delayed, by_layer
        self.new_cache = new_cache
        self.pool = ScratchPool()
        self._reading: Optional[GraphReading] = reading
        self._known = KnownGraphs()
        self._prepared: Optional[PreparedGraph] = None
        # What was prepared last, of this loss or one before.
        self._before: Optional[PreparedGraph] = None

    @property
    def present(self) -> Optional[PreparedGraph]:
        """The graph as it was when it was last looked at; None: nobody has."""
        return self._prepared

    @property
    def undoable(self) -> List[Undoable]:
        """What an iteration changes."""
        last = self._prepared or self._before
        return [self] if last is None else [self, last.statistics, last.cache]

    def prepared(self) -> PreparedGraph:
        """The graph as it was when it was last looked at."""
        if self._prepared is None:
            self._prepared = self._prepare()
        return self._prepared

    def current(self, *, wired: bool) -> PreparedGraph:
        """The graph as it is now.

        Args:
            wired: whether `plan` has just seen how it is wired.
        """
        if self._prepared is not None:
            watch = self._prepared.plan.watch
            if not (watch.reshaped or watch.marked_otherwise) and (wired or not watch.rewired):
                return self._prepared
        self._prepared = self._prepare()
        return self._prepared

    def plan(self) -> GraphPlan:
        """The plan of the graph as it is wired now; before forward nnabla itself does not know which of its
        variables need a gradient.
        """
        if self._prepared is None or self._prepared.plan.watch.rewired:
            self._prepared = self._prepare()
        return self._prepared.plan

    def go_on_from(self, before: GraphPreparation) -> None:
        """Go on with what is known of the network's graph before, or of one that was built alike."""
        self.pool, self._known = before.pool, before._known
        self._prepared, self._before = None, before._prepared or before._before

    def drop(self) -> None:
        """Have it prepared anew."""
        self._prepared = None

    def drop_schedules(self) -> None:
        """Have scales chosen anew, for graphs of any structure."""
        self._known.drop_schedules()
        for one in (self._prepared, self._before):
            if one is not None:
                one.cache.drop()

    def forget(self) -> None:
        """Drop what was measured, and have scales chosen anew."""
        self._known.forget()
        self.drop_schedules()
        prepared = self.prepared()
        prepared.statistics = self.new_statistics(prepared.plan, prepared.measurements)

    def new_statistics(self, plan: GraphPlan, measurements: Optional[Measurements]) -> StatisticsSource:
        """Statistics of which nothing is known yet."""
        if measurements is None:
            return ImmediateStatistics(plan, self._kernels, self.pool, self._storage)
        return DelayedStatistics(plan, measurements, self.pool, self._storage)

    def _prepare(self) -> PreparedGraph:
        reading, self._reading = self._reading, None
        if reading is None or not reading.is_current:
            reading = self._read()
        before, self._before = self._prepared or self._before, None
        described = reading.description(self._names_for(reading, before))
        known = self._known.of(described, self._options, reading.leaves)
        plan = GraphPlan.bound(reading, known.structure)
        if before is not None and before.plan.structure is not plan.structure:
            self.pool.end_graph()
        if before is not None and before.known is known:
            return before.built_again(plan, self._storage)
        if before is not None:
            before.known.cache = before.cache
            before.known.statistics = before.statistics.state(before.plan.structure.measured)
        # Per variable its gradient, as it arrives and as one branch, and its data.
        rows = 3 * len(plan.variables) + 64
        measurements = measurements_by(self._kernels, rows) if self._delayed else None
        statistics = self.new_statistics(plan, measurements)
        cache = self.new_cache() if known.cache is None else known.cache
        if known.statistics is not None:
            statistics.load_state(plan.structure.measured, known.statistics)
        emulated = self._storage is not None
        return PreparedGraph(
            known, plan, self._by_layer, emulated, self.pool, measurements, statistics, cache
        )

    def _names_for(self, reading: GraphReading, before: Optional[PreparedGraph]) -> ParameterNames:
        """Names of the parameters of a graph: those of this loss, and what they were called before."""
        if before is not None:
            names = {**before.plan.names, **self._names}
            if all(reading.keys[position] in names for position in reading.needed):
                return names
        return completed_names({**self._more_names(), **self._names}, reading)
