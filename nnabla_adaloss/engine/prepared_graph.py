# SPDX-License-Identifier: Apache-2.0
"""The graph of a loss as passes need it: its plan, and what is measured of its arrays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from ..core.components import Components, Joined
from ..core.config import AdaLossConfig
from ..core.layer_record import Reason
from ..core.methods import Fixed, Needs
from ..core.schedule import ScaleSchedule, Schedules
from ..emulation.rounded_storage import NativeStorage, RoundedStorage
from ..graph.description import GraphDescription
from ..graph.float_tail import TailReader
from ..graph.loss_weights import LossWeights
from ..graph.names import ParameterNames, Parameters, names_of, registered_names
from ..graph.plan import GraphPlan
from ..graph.structure import GraphStructure, PlanOptions
from ..kernels import Kernels, Measurements, measurements_by
from ..kernels.arrays import places_of
from ..kernels.scratch import ScratchPool
from .gradient_ranges import GradientRanges
from .hookless_steps import HooklessSteps
from .slices import Slice, slices_of
from .statistics import Statistics, Wanted

# Both losses of an adversarial network, or recurrent networks of so many lengths.
_REMEMBERED = 16

_NO_STEPS: Any = MappingProxyType({})


class Resting(NamedTuple):
    """What is known of graphs that are wired in one way, while others are in use: no graph, nor an array."""

    structure: GraphStructure  # with the shapes of the last one
    schedules: Schedules
    statistics: Sequence[Any]  # what `Statistics.state` returned


@dataclass
class PreparedGraph:
    """A graph with its components, and the schedules in use."""

    undone: ClassVar = ("schedules",)
    plan: GraphPlan
    config: AdaLossConfig
    kernels: Kernels
    pool: ScratchPool
    measurements: Measurements
    statistics: Statistics
    storage: NativeStorage  # an emulated one sees every gradient
    schedules: Schedules
    # By loss weights a schedule, and how it can be applied at once, or why not.
    steps: Mapping[Tuple[float, ...], Tuple[ScaleSchedule, Union[HooklessSteps, str]]] = _NO_STEPS
    # The schedule that was chosen last, and what from, where that may be compared.
    chosen: Tuple[Optional[ScaleSchedule], Any] = (None, None)
    _shares: Sequence[Optional[Slice]] = ()

    def built_again(self, plan: GraphPlan, storage: NativeStorage) -> PreparedGraph:
        """The same for another graph of the same topology."""
        structure = plan.structure
        # Steps that do not hold for another graph are made anew.
        steps = {
            weights: known
            for weights, known in self.steps.items()
            if isinstance(known[1], str) or known[1].hold_for(structure)
        }
        again = replace(self, plan=plan, storage=storage, steps=steps)
        again.statistics.bind(plan, storage)
        if structure is not self.plan.structure:
            again._shares = ()
        return again

    @cached_property
    def components(self) -> Components:
        """The parts of the network that get a scale each."""
        return self.plan.structure.components(by_layer=not self.schedules.constant)

    @cached_property
    def _weights(self) -> LossWeights:
        return self.plan.structure.loss_weights(by_layer=not self.schedules.constant)

    @property
    def joined(self) -> Optional[Joined]:
        """Which components share a scale in passes without hooks; None: each has one of its own."""
        if self.config.method.needs is not Needs.COMPONENTS:
            return None
        found = self.plan.structure.joined
        return found if len(found.components.names) < len(found.of) else None

    @cached_property
    def in_float(self) -> FrozenSet[int]:
        """The functions of one element that are given gradients in float32, and hand them on so."""
        structure, keys, rounded = self.plan.structure, self.plan.keys, self.storage.rounded_gradients()
        exact = {n.number for n in structure.nodes if n.separates and not (n.non_homogeneous or n.half)}
        found = set()
        for node in structure.nodes:
            # What hands it on to others as it is, as a stack of losses does, would hand on that scale.
            output = node.outputs[0]
            if keys[output] not in rounded and exact.issuperset(
                {node.number, *structure.readers.get(output, ())}
            ):
                found.add(node.number)
        return frozenset(found)

    @cached_property
    def ranges(self) -> Optional[GradientRanges]:
        """What each gradient may reach, where layers are stored in different formats."""
        storage = self.storage
        if not isinstance(storage, RoundedStorage) or storage.precisions.only is not None:
            return None
        return GradientRanges(self.config, storage, self.plan)

    @cached_property
    def limits(self) -> Sequence[float]:
        """The largest magnitude that a gradient of each component can have."""
        count = len(self.components.names)
        if self.ranges is not None:
            found = self.ranges.of_components(self.components)
            return [found.get(index, self.config.range.u_max) for index in range(count)]
        u_max = self.config.range.u_max
        of_single = max(u_max, self.storage.largest_single)
        return [of_single if i in self.components.single else u_max for i in range(count)]

    def loss_weights(self, given_scale: Optional[float]) -> Tuple[float, ...]:
        """The loss weight of each component, as the graph is now; 1 where all scales are S0 for good."""
        if self.schedules.for_good(given_scale):
            return (1.0,) * len(self.components.names)
        return self._weights.read(self.plan.all_variables, on_host=not self.kernels.asynchronous)

    def schedule(
        self,
        scales: Sequence[float],
        given_scale: Optional[float],
        weights: Tuple[float, ...],
        joined: Optional[Joined] = None,
        reasons: Mapping[str, Reason] = _NO_STEPS,
        unbounded: Mapping[str, float] = _NO_STEPS,
    ) -> ScaleSchedule:
        nodes, components = self.plan.structure.nodes, self.components
        return ScaleSchedule(
            nodes, components, scales, given_scale, weights, reasons, unbounded, joined, self.in_float
        )

    def keep_steps(self, schedule: ScaleSchedule, steps: Union[HooklessSteps, str]) -> None:
        """Keep what was planned for a schedule, for as many as there are in use."""
        others = self.steps
        if schedule.loss_weights not in others:
            others = {
                weights: known
                for weights, known in others.items()
                if self.schedules.last(weights) is not None
            }
        self.steps = {**others, schedule.loss_weights: (schedule, steps)}

    def share(self, iteration: int, given_scale: Optional[float]) -> Optional[Slice]:
        """What an iteration measures that uses the schedule, or has this S0; None: nothing."""
        number = self.schedules.share(iteration)
        if number is None:
            return None
        if not self._shares:
            structure, wanted = self.plan.structure, self.statistics.wanted
            gradients = {*structure.largest_gradients} | wanted.gradients | wanted.watched
            shares = slices_of(structure, gradients, wanted.data, self.schedules.iterations)
            if self.storage.rounds:
                # It sees every gradient of every pass, but for those of functions in float.
                shares = [share._replace(leaves=frozenset(structure.leaves)) for share in shares]
            self._shares = [share if any(share) else None for share in shares]
        found = self._shares[number]
        return None if found is None or self.schedules.for_good(given_scale) else found


def _one_array(places: Sequence[Tuple[int, int]], names: Sequence[str]) -> Dict[int, int]:
    """By index of an array, the first one at the same place; ValueError where two overlap otherwise."""
    first = {place: index for index, place in reversed([*enumerate(places)]) if place[0] < place[1]}
    ordered = sorted(first)
    for before, after in zip(ordered, ordered[1:]):
        if after[0] < before[1]:
            one, other = names[first[before]], names[first[after]]
            raise ValueError(
                f"the gradients of {one} and {other} overlap in memory, but are not one array: each would be "
                "unscaled in part; give each leaf a gradient of its own, such as leaf.grad = "
                "nn.NdArray(leaf.shape)"
            )
    return {index: first[place] for index, place in enumerate(places) if first.get(place, index) != index}


class Preparation:
    """Prepares the graph of one loss, and does so anew when the graph is not what it was."""

    undone = "present", "_before", "_resting"

    def __init__(
        self,
        reader: TailReader,
        graph: GraphPlan,
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
        # As it was read first, before anything was prepared.
        self._read: Optional[GraphPlan] = graph
        self._kernels, self._storage = kernels, storage
        needs = config.method.needs
        adaptive = needs is not Needs.NOTHING
        self._options = PlanOptions(config.selection, adaptive, frozenset(non_homogeneous))
        # Names are those that the scope shows in which the loss is wrapped.
        self._names = registered_names()
        # Whether all layers have one scale for good, so that where S0 is given nothing is measured.
        constant = isinstance(config.method, Fixed) and config.method.fixed_loss_scale == 1.0
        self._no_schedules = Schedules(config.iterations_per_measurement, constant=constant, delayed=delayed)
        # Whether the method looks at statistics of layers, and whether somebody else does.
        self._looked_at, self._watched = needs in (Needs.STATISTICS, Needs.HISTORY), watched
        self.pool = ScratchPool()
        # Other ways in which the network's graphs were built, the last one last.
        self._resting: Tuple[Resting, ...] = ()
        # Keys of the leaves whose gradients were looked through, and which of them are one array, by index.
        self._looked_through: List[int] = []
        self._one_array: Mapping[int, int] = {}
        # As the graph was when it was last looked at.
        self.present: Optional[PreparedGraph] = None
        # What was prepared last, of this loss or one before.
        self._before: Optional[PreparedGraph] = None

    @property
    def undoable(self) -> List[Any]:
        last = self.present or self._before
        return [self] if last is None else [self, last, last.statistics]

    def prepared(self) -> PreparedGraph:
        """The graph as it was when it was last looked at."""
        if self.present is None:
            self.present = self._prepare()
        return self.present

    def current(self, *, wired: bool) -> PreparedGraph:
        """The graph as it is now."""
        found = self.present
        if found is not None:
            plan = found.plan
            if not (plan.reshaped or plan.marked_otherwise) and (wired or not plan.rewired):
                return found
        self.present = found = self._prepare()
        return found

    def plan(self) -> GraphPlan:
        """The plan of the graph as it is wired now."""
        if self.present is None or self.present.plan.rewired:
            self.present = self._prepare()
        return self.present.plan

    def go_on_from(self, before: Preparation) -> None:
        """Go on with what is known of the network's graph before, or of one that was built alike."""
        self.pool, self._resting = before.pool, before._resting
        self._looked_through, self._one_array = before._looked_through, before._one_array
        self.present, self._before = None, before.present or before._before

    def drop_schedules(self) -> None:
        """Have scales chosen anew, for graphs of any structure."""
        self._resting = tuple([one._replace(schedules=one.schedules.drop()) for one in self._resting])
        for one in (self.present, self._before):
            if one is not None:
                one.schedules = one.schedules.drop()

    def forget_others(self) -> None:
        """Drop what was learned of graphs of another structure."""
        self._resting = tuple(
            [one._replace(schedules=self._no_schedules, statistics=()) for one in self._resting]
        )

    def forget(self) -> None:
        """Drop what was measured, and have scales chosen anew."""
        self.forget_others()
        self.drop_schedules()
        self.prepared().statistics.load_state((), ())

    def _prepare(self) -> PreparedGraph:
        graph, self._read = self._read, None
        if graph is None or not graph.is_current:
            graph = self._reader.read()
        before, self._before = self.present or self._before, None
        names = self._names_for(graph, before)
        described = graph.description(names, self._one_gradient(graph, names))
        if before is None:
            return self._found(graph, self._wake(graph, described))
        own = before.plan.structure
        alike = own.of_alike(described, self._options)
        if alike is not own:
            self.pool.end_graph()
        if alike is not None:
            return before.built_again(graph.with_roles(alike), self._storage)
        known = self._wake(graph, described)
        rests = Resting(own, before.schedules, before.statistics.state(own.measured))
        self._resting = (*self._resting[2 - _REMEMBERED :], rests)
        return self._found(graph, known)

    def _wake(self, graph: GraphPlan, described: GraphDescription) -> Resting:
        """What is known of a graph; all is found out, if none that was wired alike is remembered."""
        for known in self._resting[::-1]:
            alike = known.structure.of_alike(described, self._options)
            if alike is not None:
                self._resting = tuple([one for one in self._resting if one is not known])
                return known._replace(structure=alike)
        structure = GraphStructure(described, self._options, graph.functions, graph.all_leaves)
        return Resting(structure, self._no_schedules, ())

    def _found(self, graph: GraphPlan, known: Resting) -> PreparedGraph:
        plan, structure = graph.with_roles(known.structure), known.structure
        # Per variable its gradient, as it arrives and as one branch, and its data.
        measurements = measurements_by(self._kernels, 3 * len(plan.variables) + 64)
        statistics = Statistics(plan, measurements, self.pool, self._storage, self._wanted(structure))
        statistics.load_state(structure.measured, known.statistics)
        passes = plan, self._config, self._kernels, self.pool, measurements, statistics, self._storage
        return PreparedGraph(*passes, known.schedules)

    def _one_gradient(self, graph: GraphPlan, names: ParameterNames) -> Dict[int, int]:
        """By position of a leaf, the first one whose gradient is the same array."""
        positions = sorted(graph.needed, key=lambda p: (graph.keys[p] not in names, p))
        keys = [graph.keys[p] for p in positions]
        if keys != self._looked_through:
            leaves = [graph.all_leaves[p] for p in positions]
            places = places_of([leaf.grad for leaf in leaves], self._kernels.context)
            self._one_array = _one_array(
                places, [names.get(k, f"an input of shape {v.shape}") for k, v in zip(keys, leaves)]
            )
            self._looked_through = keys
        return {positions[own]: positions[first] for own, first in self._one_array.items()}

    def _wanted(self, structure: GraphStructure) -> Wanted:
        """What is measured besides what counts for components."""
        slots = structure.layer_slots.values()
        outputs = frozenset(node.outputs[0] for node, _ in slots)
        # Scaled copies of weights are stored as they are, and must not leave the range.
        stored = self._looked_at or self._storage.rounds
        return Wanted(
            outputs if self._looked_at else frozenset(),
            # What backward computes again is not there before it; to read it makes nnabla believe that it is.
            frozenset(
                slot.factor
                for node, slot in slots
                if (stored or node.half) and not structure.described.recomputed[slot.factor]
            ),
            outputs if self._watched else frozenset(),
        )

    def _names_for(self, graph: GraphPlan, before: Optional[PreparedGraph]) -> ParameterNames:
        """Names of the parameters of a graph: those of this loss, and what they were called before."""
        if before is not None:
            names = {**before.plan.names, **self._names}
            if all(graph.keys[position] in names for position in graph.needed):
                return names
        return graph.completed_names({**names_of(self._parameters), **self._names})
