# SPDX-License-Identifier: Apache-2.0
"""Report of a backward pass: magnitudes of components, and where an overflow showed."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import AbstractSet, Dict, Iterator, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from ..core.components import Components, component_of_contribution
from ..core.memory import PassMeasurements
from ..core.schedule import ScaleSchedule
from ..graph.graph import Graph
from ..graph.plan import GraphPlan
from ..kernels.measurements import Results
from .chooser import Decision
from .latest_statistics import GradientStatistics
from .leaf_gradients import Contribution, WrittenLeaves
from .prepared_graph import PreparedGraph


@dataclass(frozen=True)
class PassReport:
    """Report of a backward pass: `result` of an `AdaptiveLossScaling`.

    Attributes:
        found_inf: functions, by name, whose gradients are not finite, first in backward order first.
        kind: `"hookless"`; `"measuring"` if every gradient was measured, with hooks; else the reason why the
            pass had hooks.
        state_finite: True if running statistics and other leaves that forward has written are finite.
        loss_is_nan: True if the loss is NaN.
        loss_is_infinite: True if the loss is infinite; its gradients may be finite.

    Example:
        >>> import numpy as np, nnabla as nn, nnabla.functions as F, nnabla.parametric_functions as PF
        >>> from nnabla_adaloss import AdaptiveLossScaling
        >>> x = nn.Variable.from_numpy_array(np.ones((4, 3), np.float32))
        >>> scaling = AdaptiveLossScaling(F.mean(PF.affine(x, 2, name="a") ** 2))
        >>> scaling.forward(clear_no_need_grad=True)
        >>> scaling.backward(clear_buffer=True)
        >>> scaling.result
        PassReport(kind='measuring', found_inf=[], component=None, state_finite=True)
    """

    graph: Graph
    measurements: PassMeasurements
    leaves: Sequence[Contribution]  # contributions whose gradients were written
    largest: Sequence[float]  # magnitude of each, divided by its scale; infinity if it is not finite
    found_inf: Sequence[str]
    kind: str
    state_finite: bool
    loss_is_nan: bool
    loss_is_infinite: bool

    def __repr__(self) -> str:
        return (
            f"PassReport(kind={self.kind!r}, found_inf={list(self.found_inf)}, component={self.component!r}, "
            f"state_finite={self.state_finite})"
        )

    @property
    def schedule(self) -> ScaleSchedule:
        """Schedule of the pass: scales and components."""
        return self.measurements.schedule

    @property
    def component(self) -> Optional[str]:
        """Name of the first component, in backward order, where an overflow showed; None: all were finite."""
        first = self.measurements.overflowed
        return None if first is None else self.schedule.components.names[first]

    @property
    def nonzero(self) -> Iterator[int]:
        """Keys of the leaves whose gradients are not all zeros, one by one: usually the first is enough."""
        keys = self.graph.keys
        return (keys[one.leaf] for one, amax in zip(self.leaves, self.largest) if amax)

    @property
    def nonfinite(self) -> AbstractSet[int]:
        """Keys of the leaves whose gradients are not finite."""
        keys = self.graph.keys
        return {keys[one.leaf] for one, amax in zip(self.leaves, self.largest) if amax == math.inf}


class FinishedPass(NamedTuple):
    """Pass that has run, with its measurements."""

    prepared: PreparedGraph
    decision: Decision
    written: WrittenLeaves
    gradients: GradientStatistics
    results: Results

    def report(self, kind: str) -> PassReport:
        """Make the report of the pass; `kind`: see `PassReport`."""
        prepared, decision, results = self.prepared, self.decision, self.results
        functions, first, suspected = self._overflow()
        measurements = PassMeasurements(
            schedule=decision.schedule,
            u_max=prepared.u_maxes,
            amax=self._component_amaxes(),
            measured_all=decision.measure_all,
            shows_every_overflow=prepared.storage.rounds,
            finite=not functions,
            has_gradients=any(results.largest),
            overflowed=first,
            suspected=suspected,
        )
        return PassReport(
            graph=prepared.graph,
            measurements=measurements,
            leaves=self.written.contributions,
            largest=results.largest,
            found_inf=functions,
            kind=kind,
            state_finite=results.watched_finite,
            loss_is_nan=math.isnan(results.loss_amax),
            loss_is_infinite=results.loss_amax == math.inf,
        )

    def _component_amaxes(self) -> Dict[int, float]:
        """Largest unscaled magnitude of each component in the slice and in all rounded arrays."""
        plan, keys, storage = self.prepared.plan, self.prepared.graph.keys, self.prepared.storage
        measured, rounded = self.decision.slice, storage.gradients
        components, scales = self.decision.schedule.components, self.decision.schedule.scales
        if measured is None:
            return {}
        amaxes = self.written.amax_of_components(self.results.largest, measured.leaves)

        def include(position: int, amax: float) -> None:
            index = components.of.get(position)
            if index is not None and (index not in amaxes or amax > amaxes[index]):
                amaxes[index] = amax

        for position, (statistics, scale) in self.gradients.items():
            # Gradients between functions in float cannot overflow in half, so that they must not lower a
            # scale; except for components of scalars, which would have no amax otherwise.
            is_stored = keys[position] in rounded if storage.rounds else position not in plan.in_float
            among_scalars = components.of.get(position) in components.scalar_components
            if position in plan.limiting_gradients and (is_stored or among_scalars):
                include(position, statistics.abs_max / scale)
        # An emulation has measured all that it `rounded` (nothing in native storage), in the slice or not.
        # Scalars count in the slice only, as native ones do.
        for position in plan.largest_gradients if rounded else ():
            if position not in plan.scalars and keys[position] in rounded:
                include(position, rounded[keys[position]].statistics.abs_max / scales[position])
        return amaxes

    def _overflow(self) -> Tuple[Sequence[str], Optional[int], AbstractSet[int]]:
        """Functions with nonfinite gradients, the first component with one, and suspected predecessors."""
        plan, keys, storage = self.prepared.plan, self.prepared.graph.keys, self.prepared.storage
        schedule, measured_all, rounded = self.decision.schedule, self.decision.measure_all, storage.gradients
        nonfinite = {p for p, (statistics, _) in self.gradients.items() if statistics.nonfinite}
        leaf_overflowed = math.inf in self.results.largest
        # An overflow at rounding nearly always reaches a leaf: with finite ones, a search of all roundings
        # would only cost time. A pass that measures all, which is rare, finds those that a function clips.
        if measured_all or nonfinite or leaf_overflowed:
            scaled = (p for p in schedule.scales if keys[p] in rounded)
            overflowed = {p for p in scaled if rounded[keys[p]].statistics.nonfinite}
            nonfinite |= overflowed.difference(plan.leaves)  # leaves: see `nonfinite_leaves`
        if not (nonfinite or leaf_overflowed):
            return (), None, frozenset()
        contributions = zip(self.written.contributions, self.results.largest)
        nonfinite_leaves = {one.leaf for one, amax in contributions if amax == math.inf}
        leaf_components, finite_components = self._components_of_leaves(nonfinite_leaves)
        first = first_overflow(plan, schedule.components, nonfinite, leaf_components)
        leaves_of = [{*map(plan.leaf, node.leaves)} for node in plan.nodes]
        if nonfinite:
            # The one master of a weight that several functions read does not tell which of them overflowed,
            # but their output gradients do.
            uses = Counter(leaf for leaves in leaves_of for leaf in leaves)
            nonfinite_leaves = {leaf for leaf in nonfinite_leaves if uses[leaf] == 1}
        functions = [
            node.label
            for node, leaves in zip(plan.nodes, leaves_of)
            if not nonfinite.isdisjoint(node.outputs) or not nonfinite_leaves.isdisjoint(leaves)
        ]
        # If not all gradients were measured, an overflow in functions without weights, such as pooling, shows
        # only in a later layer's weight. An emulation has seen every gradient.
        if first is None or storage.rounds or measured_all:
            return functions, first, frozenset()
        return functions, first, suspected_predecessors(schedule.components, first, finite_components)

    def _components_of_leaves(self, nonfinite_leaves: AbstractSet[int]) -> Tuple[Dict[int, int], Set[int]]:
        """Component of each function's first nonfinite leaf; and all components with a finite leaf."""
        plan, written, largest = self.prepared.plan, self.written, self.results.largest
        # Function and leaf of each contribution of this batch; True if its gradient is not finite.
        parts = [(one.node, one.leaf, largest[place] == math.inf) for one, place in written.measured]
        # Of leaves that accumulate batches only the sum was measured: it speaks for all their functions.
        measured = {one.leaf for one, _ in written.measured}
        for node in plan.nodes:
            unmeasured = [leaf for leaf in map(plan.leaf, node.leaves) if leaf not in measured]
            parts += [(node, leaf, leaf in nonfinite_leaves) for leaf in unmeasured]
        nonfinite: Dict[int, int] = {}
        finite: Set[int] = set()
        for node, leaf, is_nonfinite in parts:
            component = component_of_contribution(node, leaf, written.components.of)
            if is_nonfinite:
                nonfinite.setdefault(node.number, component)  # the first of several leaves stays
            else:
                finite.add(component)
        return nonfinite, finite


def first_overflow(
    plan: GraphPlan,
    components: Components,
    nonfinite: AbstractSet[int],  # positions of gradients that are not finite
    leaf_components: Mapping[int, int],  # component of a function's nonfinite leaf, by its number
) -> Optional[int]:
    """First component, in backward order, with a nonfinite gradient."""
    for node in plan.nodes:
        if not nonfinite.isdisjoint(node.outputs):
            return components.of[node.outputs[0]]
        if node.number in leaf_components:
            return leaf_components[node.number]
    return None


def suspected_predecessors(components: Components, overflowed: int, finite: AbstractSet[int]) -> Set[int]:
    """Predecessors in which the overflow may have begun: none of their gradients is known to be finite."""
    # The search ends at `finite` components, and at scalars: usually in float32, they overflow last.
    ends = finite | components.scalar_components
    reached, count = {overflowed}, 0
    while count < len(reached):
        count = len(reached)
        reached |= {edge.predecessor for edge in components.edges if edge.successor in reached} - ends
    return reached - {overflowed}
