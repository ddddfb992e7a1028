# SPDX-License-Identifier: Apache-2.0
"""The graph of a loss as passes need it: its plan, and what is measured of its arrays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Callable, List, Mapping, Optional, Sequence, Tuple, Union

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
from .passes.backward_pass import PassContext
from .passes.hookless import HooklessSteps
from .schedule import ScaleSchedule, ScheduleCache
from .statistics import Share, Statistics, Wanted, shares_of

# Both losses of an adversarial network, or recurrent networks of so many lengths.
_REMEMBERED = 16


@dataclass
class KnownGraph:
    """A way in which graphs are wired; no graph itself, nor any array of it, is kept."""

    structure: GraphStructure  # with the shapes of the last one
    cache: Optional[ScheduleCache] = None  # in use when the network's graph was last built otherwise
    statistics: Optional[Sequence[Any]] = None  # what `Statistics.state` returned then


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
        """What is known of a graph; all is found out, if none that was wired alike is remembered."""
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
class PreparedGraph(PassContext):
    """A graph with its components, and the schedule in use."""

    known: KnownGraph
    components: Components
    cache: ScheduleCache
    # The schedule that `steps` were planned for: how it can be applied at once, or why not.
    planned_for: Optional[ScaleSchedule] = None
    steps: Union[HooklessSteps, str, None] = None
    _shares: Sequence[Optional[Share]] = ()

    def built_again(
        self, plan: GraphPlan, components: Components, storage: Optional[RoundedStorage]
    ) -> PreparedGraph:
        """The same for another graph of the same topology."""
        again = replace(self, plan=plan, components=components, storage=storage, planned_for=None, steps=None)
        again.statistics.bind(plan, storage)
        if plan.structure is not self.plan.structure:
            again._shares = ()
        # Of steps that do not hold for another graph, new ones are made.
        if isinstance(self.steps, str) or (self.steps and self.steps.hold_for(plan.structure)):
            again.steps, again.planned_for = self.steps, self.planned_for
        return again

    def share(self, iteration: int) -> Optional[Share]:
        """What an iteration measures that uses the schedule; None: nothing."""
        number = self.cache.share(iteration)
        if number is None:
            return None
        if not self._shares:
            structure, wanted = self.plan.structure, self.statistics.wanted
            gradients = {*structure.largest_gradients} | wanted.gradients | wanted.watched
            shares = shares_of(structure, gradients, wanted.data, self.cache.iterations)
            if self.storage is not None:
                # It sees every gradient of every pass, but for those of functions in float.
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
    """Prepares the graph of one loss, and does so anew when the graph is not what it was."""

    undone = "present", "_before"

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
        by_layer: bool,
        looked_at: Tuple[bool, bool],
        new_cache: Callable[[], ScheduleCache],
    ) -> None:
        self._read, self._options = read, options
        self._names, self._more_names = names, more_names
        self._kernels, self._storage, self._by_layer = kernels, storage, by_layer
        # Whether the method looks at statistics of layers, and whether somebody else does.
        self._looked_at = looked_at
        self.new_cache = new_cache
        self.pool = ScratchPool()
        self._reading: Optional[GraphReading] = reading
        self._known = KnownGraphs()
        # As the graph was when it was last looked at.
        self.present: Optional[PreparedGraph] = None
        # What was prepared last, of this loss or one before.
        self._before: Optional[PreparedGraph] = None

    @property
    def undoable(self) -> List[Undoable]:
        """What an iteration changes."""
        last = self.present or self._before
        return [self] if last is None else [self, last.statistics, last.cache]

    def prepared(self) -> PreparedGraph:
        """The graph as it was when it was last looked at."""
        if self.present is None:
            self.present = self._prepare()
        return self.present

    def current(self, *, wired: bool) -> PreparedGraph:
        """The graph as it is now."""
        if self.present is not None:
            plan = self.present.plan
            changed = plan.reshaped or plan.reading.marked_otherwise
            if not changed and (wired or not plan.reading.rewired):
                return self.present
        self.present = self._prepare()
        return self.present

    def plan(self) -> GraphPlan:
        """The plan of the graph as it is wired now; before forward nnabla itself does not know which of its
        variables need a gradient.
        """
        if self.present is None or self.present.plan.reading.rewired:
            self.present = self._prepare()
        return self.present.plan

    def go_on_from(self, before: GraphPreparation) -> None:
        """Go on with what is known of the network's graph before, or of one that was built alike."""
        self.pool, self._known = before.pool, before._known
        self.present, self._before = None, before.present or before._before

    def drop(self) -> None:
        """Have it prepared anew."""
        self.present = None

    def drop_schedules(self) -> None:
        """Have scales chosen anew, for graphs of any structure."""
        self._known.drop_schedules()
        for one in (self.present, self._before):
            if one is not None:
                one.cache.drop()

    def forget(self) -> None:
        """Drop what was measured, and have scales chosen anew."""
        self._known.forget()
        self.drop_schedules()
        prepared = self.prepared()
        prepared.statistics = self.new_statistics(prepared.plan, prepared.measurements)

    def new_statistics(self, plan: GraphPlan, measurements: Measurements) -> Statistics:
        """Statistics of which nothing is known yet."""
        by_method, watched = self._looked_at
        slots = plan.structure.layer_slots.values()
        outputs = frozenset(node.outputs[0] for node, _ in slots)
        # Scaled copies of weights are stored as they are, and must not leave the range.
        stored = by_method or self._storage is not None
        wanted = Wanted(
            outputs if by_method else frozenset(),
            frozenset(slot.factor for node, slot in slots if stored or node.half),
            outputs if watched else frozenset(),
        )
        return Statistics(plan, measurements, self.pool, self._storage, wanted)

    def _prepare(self) -> PreparedGraph:
        reading, self._reading = self._reading, None
        if reading is None or not reading.is_current:
            reading = self._read()
        before, self._before = self.present or self._before, None
        described = reading.description(self._names_for(reading, before))
        known = self._known.of(described, self._options, reading.leaves)
        plan = GraphPlan.bound(reading, known.structure)
        components = plan.structure.components(by_layer=self._by_layer)
        if before is not None and before.plan.structure is not plan.structure:
            self.pool.end_graph()
        if before is not None and before.known is known:
            return before.built_again(plan, components, self._storage)
        if before is not None:
            before.known.cache = before.cache
            before.known.statistics = before.statistics.state(before.plan.structure.measured)
        # Per variable its gradient, as it arrives and as one branch, and its data.
        measurements = measurements_by(self._kernels, 3 * len(plan.variables) + 64)
        statistics = self.new_statistics(plan, measurements)
        cache = self.new_cache() if known.cache is None else known.cache
        if known.statistics is not None:
            statistics.load_state(plan.structure.measured, known.statistics)
        passes = plan, self._kernels, self.pool, measurements, statistics, self._storage
        return PreparedGraph(*passes, known, components, cache)

    def _names_for(self, reading: GraphReading, before: Optional[PreparedGraph]) -> ParameterNames:
        """Names of the parameters of a graph: those of this loss, and what they were called before."""
        if before is not None:
            names = {**before.plan.names, **self._names}
            if all(reading.keys[position] in names for position in reading.needed):
                return names
        return completed_names({**self._more_names(), **self._names}, reading)
