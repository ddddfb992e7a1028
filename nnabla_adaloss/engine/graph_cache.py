# SPDX-License-Identifier: Apache-2.0
"""Prepared graph of a loss, updated when the graph is rebuilt, and states of earlier topologies."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import nnabla as nn

from ..core.config import AdaLossConfig
from ..core.methods import Fixed, Needs
from ..core.schedule_cache import ScheduleCache
from ..emulation.rounded_storage import NativeStorage
from ..graph.description import GraphDescription
from ..graph.float_tail import TailReader
from ..graph.graph import Graph
from ..graph.names import ParameterNames, Parameters, names_of, registered_names
from ..graph.plan import GraphPlan, PlanOptions
from ..kernels import Kernels, measurements_by
from ..kernels.arrays import ScratchPool, places_of
from .latest_statistics import LatestStatistics, StatisticsRequest
from .prepared_graph import PreparedGraph
from .saved_state import Saved, read_topology, select_state, topology_state, without_schedule

# Number of remembered topologies, such as recurrent networks of 16 lengths.
_REMEMBERED = 16


class Topology(NamedTuple):
    """State of one topology, without graph and arrays."""

    plan: GraphPlan  # with the shapes of its last graph
    schedules: ScheduleCache
    statistics: Sequence[Any]  # from `LatestStatistics.state`
    # From `PreparedGraph.state_descriptions` of the last graph, for leaves that a rebuilt graph replaces.
    replaced_state: Mapping[int, str] = {}


class GraphCache:
    """Prepares the graph of one loss, and prepares it again when it has changed."""

    undone = "_last", "_is_adopted", "_others", "_saved"  # restored from a `savepoint`

    def __init__(
        self,
        reader: TailReader,
        graph: Graph,
        config: AdaLossConfig,
        parameters: Parameters,
        non_homogeneous: Sequence[str],
        *,
        kernels: Kernels,
        storage: NativeStorage,
        delayed: bool,
        watched: bool,
    ) -> None:
        self._reader, self._config, self._parameters = reader, config, parameters
        # The given graph, until it is prepared: it need not be read again.
        self._first_graph: Optional[Graph] = graph
        self._kernels, self._storage = kernels, storage
        adaptive = config.method.needs is not Needs.NOTHING
        self._options = PlanOptions(config.selection, adaptive, frozenset(non_homogeneous))
        # Names in the parameter scope in which the loss is wrapped.
        self._names = registered_names()
        # A layer with a fixed alpha of 1 changes no scale: its output and input are in one component.
        by_layer = not (isinstance(config.method, Fixed) and config.method.fixed_loss_scale == 1.0)
        cycle = config.iterations_per_measurement
        self._no_schedules = ScheduleCache(cycle, by_layer=by_layer, delayed=delayed)
        self._watched = watched  # True if a monitor uses statistics of layers
        self.pool = ScratchPool()
        self._shared_gradients = SharedGradients()
        # Other topologies of the network, the latest last.
        self._others: Tuple[Topology, ...] = ()
        # Saved states of older topologies that had no graph yet.
        self._saved: Tuple[Saved, ...] = ()
        # The graph that was prepared last; `_is_adopted` if `go_on_from` took it from another loss.
        self._last: Optional[PreparedGraph] = None
        self._is_adopted = False

    @property
    def undoable(self) -> List[Any]:
        return [self] if self._last is None else [self, self._last, self._last.statistics]

    def current(self, *, check_wiring: bool = False, after_forward: bool = False) -> PreparedGraph:
        """The prepared graph, again if it was rewired (`check_wiring`), or else changed (`after_forward`)."""
        last = self._last
        if (
            last is None
            or self._is_adopted
            # Other shapes, and other values of `need_grad` or `recompute`, take effect with a forward.
            or (after_forward and (last.reshaped or last.graph.marked_otherwise))
            or (check_wiring and last.graph.rewired)
        ):
            self._last = last = self._prepare()
            self._is_adopted = False
        return last

    def graph_and_plan(self) -> Tuple[Graph, GraphPlan]:
        """The graph and its plan, after a data feeder may have rewired it."""
        prepared = self.current(check_wiring=True)
        return prepared.graph, prepared.plan

    def drop(self) -> None:
        """Read the graph again before its next use."""
        self._last = None

    def go_on_from(self, previous: GraphCache) -> None:
        """Take over the state of another loss of the network, as after `updater.loss = rebuilt_loss`."""
        # Scratch arrays serve any graph; the result of `SharedGradients` serves one with the same parameters.
        self.pool, self._shared_gradients = previous.pool, previous._shared_gradients
        self._others, self._saved = previous._others, previous._saved
        # The next use prepares this loss's own graph.
        self._last, self._is_adopted = previous._last, True

    def drop_schedules(self) -> None:
        """Request a new choice of scales, for all topologies."""
        self._others = tuple([one._replace(schedules=one.schedules.drop()) for one in self._others])
        self._saved = tuple(map(without_schedule, self._saved))
        if self._last is not None:
            self._last.schedules = self._last.schedules.drop()

    @property
    def states_of_other_topologies(self) -> List[Saved]:
        """A `topology_state` for each topology except the present one, the latest last."""
        states = [topology_state(one.plan, one.statistics, one.schedules) for one in self._others]
        return [*self._saved, *states]

    @property
    def state_descriptions(self) -> Dict[int, str]:
        """Descriptions of leaves that forward writes, by the key of their data, in all topologies."""
        descriptions = self.current().state_descriptions()
        for one in self._others:
            descriptions.update(one.replaced_state)
        return descriptions

    def load_other_topologies(self, states: Sequence[Saved]) -> None:
        """Replace the other topologies by saved ones, each of which waits for its first graph."""
        self._others, self._saved = (), tuple(states)

    def forget(self) -> None:
        """Drop all measurements, and request a new choice of scales."""
        self.load_other_topologies(())
        self.drop_schedules()
        self.current().statistics.load({}, {})

    def _prepare(self) -> PreparedGraph:
        """Prepare the graph as it is now, with the state of its topology if this has one."""
        graph, self._first_graph = self._first_graph, None
        if graph is None or not graph.is_current:
            graph = self._reader.read()
        last, names = self._last, self._names_for(graph)
        shared_gradients = self._shared_gradients.find(graph, names, self._kernels.context)
        described = graph.description(names, shared_gradients)
        if last is not None:
            # The last plan; for other shapes an adapted copy of it; None for another topology.
            plan = last.plan.of_alike(graph, described, self._options)
            if plan is not last.plan:
                # Scratch arrays have the shapes of the last graph.
                self.pool.end_graph()
            if plan is not None:
                return last.for_graph(graph, plan, self._storage)
        remembered = self._pop_topology(graph, described)
        topology = remembered or Topology(self._new_plan(graph, described, names), self._no_schedules, ())
        # Before `_remember`, which may drop the oldest saved states.
        saved = None if remembered else self._pop_saved(topology.plan)
        if last is not None:
            # All topologies take turns in one cycle of measuring.
            schedules = topology.schedules.moved_to_cycle(last.schedules.cycle_start)
            topology = topology._replace(schedules=schedules)
            self._remember(last)
        prepared = self._prepare_with(topology, graph)
        if saved is not None:
            self._load_saved(prepared, saved)
        return prepared

    def _new_plan(self, graph: Graph, described: GraphDescription, names: ParameterNames) -> GraphPlan:
        """Plan a graph of a new topology."""
        # Adapting a plan to other parameters takes less time than planning from nothing.
        plans = [] if self._last is None else [self._last.plan, *(one.plan for one in self._others[::-1])]
        for plan in plans:
            adapted = plan.with_other_parameters(graph, described, self._options)
            if adapted is not None:
                return adapted
        shared_gradients = described.shared_gradients
        return GraphPlan(graph, **self._options._asdict(), names=names, one_gradient=shared_gradients)

    def _remember(self, previous: PreparedGraph) -> None:
        """Keep the state of the previous topology; forget the oldest one, if there are too many."""
        statistics = previous.statistics.state(previous.plan.measured)
        replaced_state = previous.state_descriptions(replaced_only=True)
        topology = Topology(previous.plan, previous.schedules, statistics, replaced_state)
        most = _REMEMBERED - 1  # besides the topology that is being prepared
        self._others = (*self._others, topology)[-most:]
        # Saved ones that still wait for a graph are the oldest.
        excess = len(self._saved) + len(self._others) - most
        self._saved = self._saved[max(excess, 0) :]

    def _pop_saved(self, plan: GraphPlan) -> Optional[Saved]:
        """Remove the saved state of a topology that gets its first graph, and return it; None without one."""
        saved = select_state(plan, self._saved) if self._saved else None
        self._saved = tuple([one for one in self._saved if one is not saved])
        return saved

    def _load_saved(self, prepared: PreparedGraph, saved: Saved) -> None:
        """Load the saved state of a topology, unless it is damaged."""
        with suppress(KeyError, TypeError, AttributeError, IndexError, ValueError):
            statistics, schedules = read_topology(saved, prepared)
            # The saved cycle is past: all topologies take turns in the one that runs now.
            prepared.schedules = schedules.moved_to_cycle(prepared.schedules.cycle_start)
            # Weights measured on the last graph are newer than the saved ones, which they replace.
            prepared.statistics.load(statistics, prepared.statistics.weights)

    def _pop_topology(self, graph: Graph, described: GraphDescription) -> Optional[Topology]:
        """Remove a graph's topology from the others and return it; None: it is not among them."""
        for other in self._others[::-1]:
            plan = other.plan.of_alike(graph, described, self._options)
            if plan is not None:
                self._others = tuple([one for one in self._others if one is not other])
                return other._replace(plan=plan)
        return None

    def _prepare_with(self, topology: Topology, graph: Graph) -> PreparedGraph:
        """Prepare a graph with the state of its topology, and with the weights measured on the last graph."""
        plan, last = topology.plan, self._last
        # All topologies have the same weights, known by name; gradients and activations belong to one.
        weights = {} if last is None else last.statistics.weights
        if last is not None and last.kernels is not self._kernels:
            # The last graph is another loss's on another device: these kernels cannot fetch its measurements.
            last = None
        # Results that fit in a GPU's table at first: a guess, as the table grows if a pass measures more.
        rows = 3 * len(plan.gradients) + 64
        measurements = measurements_by(self._kernels, rows) if last is None else last.measurements
        request = self._request(plan)
        statistics = LatestStatistics(graph, plan, measurements, self.pool, self._storage, request)
        statistics.load(LatestStatistics.read_state(plan.measured, topology.statistics), weights)
        return PreparedGraph(
            graph=graph,
            plan=plan,
            config=self._config,
            kernels=self._kernels,
            pool=self.pool,
            measurements=measurements,
            statistics=statistics,
            storage=self._storage,
            schedules=topology.schedules,
            zeroed_parameters=self._parameters,  # the solver's: `solver.zero_grad()` zeroes their gradients
        )

    def _request(self, plan: GraphPlan) -> StatisticsRequest:
        """Choose the arrays to measure besides those for components."""
        layer_inputs = plan.layer_inputs.values()
        outputs = frozenset(node.outputs[0] for node, _ in layer_inputs)
        is_used = self._config.method.needs in (Needs.STATISTICS, Needs.HISTORY)
        # Methods read weights; and in a narrow format alpha times a weight must fit, which bounds alpha.
        all_weights = is_used or self._storage.rounds
        weights = {one.weight for node, one in layer_inputs if all_weights or node.half}
        # Reading an activation that backward recomputes would mark it as computed: it would stay empty.
        data = frozenset(weight for weight in weights if not plan.described.recomputed[weight])
        none: FrozenSet[int] = frozenset()
        return StatisticsRequest(outputs if is_used else none, data, outputs if self._watched else none)

    def _names_for(self, graph: Graph) -> ParameterNames:
        """Names of a graph's parameters."""
        # Frozen parameters and data without a gradient need no names.
        needed = {graph.keys[position] for position in graph.needed}
        if self._last is not None:
            names = {**self._last.plan.names, **self._names}
            if not names.keys() >= needed:
                for other in self._others:
                    names = {**other.plan.names, **names}
            if names.keys() >= needed:
                return names
        # Rare, except for the first graph: reading the names that are registered now takes longer.
        return graph.completed_names({**names_of(self._parameters), **self._names})


class SharedGradients:
    """Finds leaves that share a gradient array; ValueError if two arrays overlap in part."""

    def __init__(self) -> None:
        # Keys of the last compared leaves, and the result by index. An array that is assigned to `leaf.grad`
        # afterwards is not compared: in each update every leaf would have to be asked for its present one.
        self._keys: List[int] = []
        self._first: Mapping[int, int] = {}

    def find(self, graph: Graph, names: ParameterNames, context: nn.Context) -> Dict[int, int]:
        """Map each leaf with the gradient array of an earlier one to that leaf, by position."""
        # Parameters are the earlier ones: their order is the same in all graphs of a topology.
        positions = sorted(graph.needed, key=lambda p: (graph.keys[p] not in names, p))
        keys = [graph.keys[p] for p in positions]
        if keys != self._keys:
            leaves = [graph.leaves[p] for p in positions]
            # One call reads all addresses: memory freed between two calls could appear at two arrays.
            places = places_of([leaf.grad for leaf in leaves], context)
            labels = [names.get(key, f"an input of shape {leaf.shape}") for key, leaf in zip(keys, leaves)]
            self._first = _first_at_same_place(places, labels)
            self._keys = keys
        return {positions[later]: positions[first] for later, first in self._first.items()}


def _first_at_same_place(places: Sequence[Tuple[int, int]], names: Sequence[str]) -> Dict[int, int]:
    """Map each array at the place (begin and end in memory) of an earlier one to that array, by index."""
    # A dict keeps the last value of a key: reversed, the first array at a place. Empty arrays share nothing.
    first = {place: index for index, place in reversed([*enumerate(places)]) if place[0] < place[1]}
    ordered = sorted(first)
    for place, following in zip(ordered, ordered[1:]):
        if following[0] < place[1]:
            raise ValueError(
                f"the gradients of {names[first[place]]} and {names[first[following]]} overlap in memory, "
                "but are not one array: their common part would be unscaled twice; give each leaf a gradient "
                "of its own, such as leaf.grad = nn.NdArray(leaf.shape)"
            )
    return {index: first[place] for index, place in enumerate(places) if first.get(place, index) != index}
