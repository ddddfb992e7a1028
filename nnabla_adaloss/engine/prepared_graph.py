# SPDX-License-Identifier: Apache-2.0
"""Graph of a loss, prepared for passes: its plan and the measurements of its arrays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, Callable, ClassVar, Dict, FrozenSet, List, Mapping, Optional, Sequence, Tuple

import nnabla as nn

from ..core.components import Components, MergedComponents
from ..core.config import AdaLossConfig
from ..core.methods import Needs, Range
from ..core.schedule import Rescale, ScaleSchedule
from ..core.schedule_cache import ScheduleCache
from ..emulation.rounded_storage import NativeStorage, RoundedStorage
from ..graph.graph import Graph
from ..graph.loss import Seed
from ..graph.loss_weights import seed_weight
from ..graph.names import Parameters, names_of
from ..graph.plan import GraphPlan
from ..kernels import Kernels, Measurements
from ..kernels.arrays import ScratchPool
from .latest_statistics import LatestStatistics
from .slices import Slice, empty_slices, slices_of


@dataclass
class PreparedGraph:
    """Graph with its components and the schedules in use."""

    undone: ClassVar = ("schedules",)  # restored from a `savepoint`
    graph: Graph
    plan: GraphPlan
    config: AdaLossConfig
    kernels: Kernels
    pool: ScratchPool
    measurements: Measurements
    statistics: LatestStatistics
    storage: NativeStorage  # an emulated one measures every gradient
    schedules: ScheduleCache
    # Parameters whose gradients are zeroed in each iteration; None: all leaves' gradients are.
    zeroed_parameters: Parameters = None
    # Results of `plan_steps`, by the scales of the components: a `HooklessSteps`, or None with a reason.
    steps: Mapping[Tuple[float, ...], Tuple[Any, str]] = MappingProxyType({})
    _slices: Sequence[Optional[Slice]] = ()

    def for_graph(self, graph: Graph, plan: GraphPlan, storage: NativeStorage) -> PreparedGraph:
        """Adapt to another graph of this topology; cached properties are computed again."""
        # Steps refer to leaves by Variable: they are dropped if the new graph has not all of these leaves.
        planned = self.steps.items()
        steps = {scales: one for scales, one in planned if one[0] is None or one[0].keys <= plan.kept_keys}
        slices = self._slices if plan is self.plan else ()
        statistics = self.statistics.for_graph(graph, plan, storage)
        return replace(
            self, graph=graph, plan=plan, storage=storage, statistics=statistics, steps=steps, _slices=slices
        )

    @cached_property
    def leaves(self) -> Dict[int, nn.Variable]:
        """Leaves with a gradient, by variable key."""
        return self.graph.by_key(self.plan.leaves)

    @cached_property
    def accumulating_leaves(self) -> FrozenSet[int]:
        """Leaves whose gradients hold sums over batches, so that the amax of this batch is unknown."""
        if self.zeroed_parameters is None:
            return frozenset()
        plan, graph, zeroed = self.plan, self.graph, names_of(self.zeroed_parameters)
        # Half or rounded gradients are measured in scratch arrays, before `LeafGradients` adds them.
        in_place = {plan.leaf(position) for node in plan.nodes if not node.half for position in node.leaves}
        sums = [leaf for leaf in in_place if graph.keys[leaf] not in zeroed]
        return frozenset([p for p in sums if not self.storage.rounds_gradient(graph.variables[p])])

    @cached_property
    def variables(self) -> List[nn.Variable]:
        """Variables with a gradient, except leaves."""
        return [self.graph.variables[p] for p in self.plan.gradients]

    @property
    def reshaped(self) -> bool:
        """True if data have changed their shape."""
        data, shapes = self._data
        return [leaf.shape for leaf in data] != shapes

    @cached_property
    def _data(self) -> Tuple[List[nn.Variable], List[Tuple[int, ...]]]:
        """Inputs of the graph that are not parameters, and the shapes that it is planned for."""
        # Of all leaves, with a gradient or not, parameters have names. `reset_shape` may change the others.
        named, keys, shapes = self.plan.names.keys(), self.graph.keys, self.plan.described.shapes
        data = {p: leaf for p, leaf in self.graph.leaves.items() if keys[p] not in named}
        return [*data.values()], [shapes[p] for p in data]

    @cached_property
    def components(self) -> Components:
        """Components of the network."""
        return self.plan.components(by_layer=self.schedules.by_layer)

    @property
    def merged(self) -> Optional[MergedComponents]:
        """Merged components for passes without hooks; None: none are merged."""
        # Methods of the paper choose an alpha for each layer, which merging would ignore.
        if self.config.method.needs is not Needs.COMPONENTS:
            return None
        merged = self.plan.merged
        return merged if len(merged.components.names) < len(merged.of) else None

    @cached_property
    def float_scalars(self) -> FrozenSet[int]:
        """Float32 scalars that may have a scale other than their component's, by number of their function."""
        # Nothing needs multiplying in a function whose scalar output has the scale of its input (see
        # `ScaleSchedule.arriving_scales`). Rounded to 16 bits, the scalar could overflow at that scale.
        plan, keys, rounded = self.plan, self.graph.keys, self.storage.rounded_gradients()
        outputs = {n.number: n.outputs[0] for n in plan.nodes if n.separates and n.linear and not n.half}
        # Each reader of the output must be such a function, too, as these multiply the gradients that they
        # write. A stack of losses does not: it would write the gradient at its own scale.
        return frozenset(
            number
            for number, output in outputs.items()
            if keys[output] not in rounded and plan.readers.get(output, set()) <= outputs.keys()
        )

    @cached_property
    def _storage_by_layer(self) -> Optional[RoundedStorage]:
        """Emulated storage whose formats differ between layers; None for any other storage."""
        storage = self.storage
        return storage if isinstance(storage, RoundedStorage) and storage.precisions.common is None else None

    def range_of(self, position: int) -> Range:
        """Range of the format in which a gradient is stored, unless the user gave a range."""
        if self._storage_by_layer is None:
            return self.config.range
        precision = self._storage_by_layer.precision_of(self.graph.keys[position])
        return self.config.range_in(precision.stored_gradients)

    @cached_property
    def u_maxes(self) -> Sequence[float]:
        """Largest magnitude that fits the formats of each component's gradients, by index."""
        scalars, indices = self.components.scalar_components, range(len(self.components.names))
        # Scalars (size 1) may be stored in a wider format than arrays, such as float32, and never in 8 bits.
        if self._storage_by_layer is None:
            narrowest, u_max = self.storage.narrowest, self.config.range.u_max
            of_scalar = u_max if narrowest is None else max(u_max, narrowest.gradient_format(1).max)
            return [of_scalar if index in scalars else u_max for index in indices]
        # A component may cross layers of several formats: its scale must suit the narrowest.
        u_maxes: Dict[int, float] = {}
        for position, index in self.components.of.items():
            u_max = self.range_of(position).u_max
            if index in scalars:
                stored = self._storage_by_layer.gradient_format(self.graph.keys[position], 1)
                u_max = max(u_max, stored.max)
            u_maxes[index] = min(u_max, u_maxes.get(index, u_max))
        return [u_maxes[index] for index in indices]

    def before_forward(self, context: nn.Context) -> None:
        """Copy loss weights to host and device: reading them after forward would wait for a GPU."""
        if self.schedules.by_layer:
            self.plan.loss_weights(by_layer=True).before_forward(self.graph.variables, context)

    def loss_weights(self, given_scale: Optional[float], grad: Optional[Seed] = None) -> Tuple[float, ...]:
        """Present loss weight of each component; 1 if all scales are a constant S0."""
        if self.schedules.measures_nothing(given_scale):
            return (1.0,) * len(self.components.names)
        on_host, in_use = not self.kernels.asynchronous, self.schedules.entries
        reader = self.plan.loss_weights(by_layer=self.schedules.by_layer)
        loss_weights = reader.read(self.graph.variables, on_host=on_host, in_use=in_use)
        if grad is None:
            return loss_weights
        # A seed gradient multiplies all gradients, as a loss weight does.
        factor = seed_weight(grad, on_host=on_host)
        return tuple([weight * factor for weight in loss_weights])

    @cached_property
    def schedule(self) -> Callable[..., ScaleSchedule]:
        """Makes a schedule for this graph, from the fields of a `ScaleSchedule` that a choice determines."""
        return partial(ScaleSchedule, self.plan.nodes, self.components, float_scalars=self.float_scalars)

    def rescale(self, rescales: Sequence[Rescale]) -> None:
        """Multiply gradients in place, between two functions; an emulated storage rounds the results."""
        for position, factor in rescales:
            array = self.graph.variables[position].grad
            self.kernels.scale_(array, factor)
            self.storage.store_gradient(self.graph.keys[position], array)

    def state_descriptions(self, *, replaced_only: bool = False) -> Dict[int, str]:
        """Describe leaves that forward writes, by key of their data, for the error of a checkpoint that lacks
        them; `replaced_only`: without those that stay in a rebuilt graph, such as parameters.
        """
        plan, leaves = self.plan, self.graph.leaves
        return {
            hash(leaves[p].data): f"{plan.labels[writer]} writes a Variable of shape {leaves[p].shape}"
            for p, writer in plan.state_leaves.items()  # writer: a function; None for data that none writes
            if writer is not None and not (replaced_only and p in plan.described.kept)
        }

    @cached_property
    def all_arrays(self) -> Slice:
        """All arrays that scales depend on, for a pass that measures all of them."""
        plan, request = self.plan, self.statistics.request
        gradients = plan.limiting_gradients | request.gradients | request.watched
        leaves = frozenset(plan.leaves) - self.accumulating_leaves
        weights = sorted(request.data)
        return Slice([*gradients], weights, activations=(), leaves=leaves, last=True)

    def slice(
        self, schedules: ScheduleCache, iteration: int, given_scale: Optional[float]
    ) -> Optional[Slice]:
        """Slice of the arrays that an iteration measures, or None; `schedules`: those of the coming pass."""
        number = schedules.slice_number(iteration)  # None with delay=0, or before the first choice
        if number is None or schedules.measures_nothing(given_scale):
            return None
        if not self._slices:
            # Dividing the arrays into slices takes too long for a graph that serves one batch only. The first
            # slices of a small graph are empty, and need no division.
            plan, count, rounds = self.plan, schedules.iterations, self.storage.rounds
            if number < empty_slices(plan, count, rounds=rounds):
                return None
            request, excluded = self.statistics.request, self.accumulating_leaves
            self._slices = slices_of(plan, request, count, rounds=rounds, excluded_leaves=excluded)
        return self._slices[number]
