# SPDX-License-Identifier: Apache-2.0
"""Steps of a pass without hooks, planned once for a schedule; or the reason why a graph needs hooks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Dict, List, Mapping, Optional, Sequence, Tuple, Union

import nnabla as nn

from ..core.components import LayerSlot, NodeStructure
from ..core.power_of_two import is_power_of_two
from ..core.schedule import Rescale, ScaleSchedule, Step
from ..graph.graph import Graph
from ..graph.plan import GraphPlan
from ..kernels.interface import GradientsInPlace
from .leaf_gradients import Contribution, contributions_of
from .scaled_weights import SwappedFactors

_zeroing, _size = attrgetter("zeroing"), attrgetter("size")


@dataclass(eq=False)
class HooklessSteps:
    """Steps before, between and after the functions of a pass without hooks."""

    factors: SwappedFactors  # weights to be swapped for all of the pass
    leaves: Sequence[Contribution]  # leaves that get a gradient, each with its first contribution
    # Where contributions are unscaled one by one: by number of a function, contributions to leaves that it
    # has written and that the next one writes.
    following: Mapping[int, Sequence[Contribution]]
    between: Mapping[int, Tuple[Rescale, ...]]  # rescales to run after a function, by its number
    # Kept from pass to pass, with the sizes that it is for.
    _gradients: Optional[GradientsInPlace] = None
    _sizes: Sequence[int] = ()

    @cached_property
    def direct(self) -> bool:
        """Whether nnabla can write to the leaves' own gradients, where these are lazily zero."""
        return not (self.following or any(leaf.half for leaf in self.leaves))

    def written(self, masters: List[nn.NdArray]) -> Tuple[Sequence[Contribution], GradientsInPlace]:
        """Contributions that were written to the gradients of the leaves, and these for unscaling."""
        # An array that is still zeroing was not written.
        if any(map(_zeroing, masters)):
            kept = [(leaf, master) for leaf, master in zip(self.leaves, masters) if not master.zeroing]
            leaves = [leaf for leaf, _ in kept]
            return leaves, GradientsInPlace([master for _, master in kept], [one.scale for one in leaves])
        # Kernels trust the sizes, and `reset_shape` may have changed them.
        sizes = list(map(_size, masters))
        if self._gradients is None or self._sizes != sizes:
            self._sizes, self._gradients = sizes, GradientsInPlace(masters, [x.scale for x in self.leaves])
        self._gradients.arrays = masters
        return self.leaves, self._gradients

    def hold_for(self, plan: GraphPlan) -> bool:
        """Return whether a graph of this plan has the same weights, so that the steps hold for it."""
        return plan.kept_keys.issuperset(self.factors.keys)


def plan_steps(
    graph: Graph, plan: GraphPlan, schedule: ScaleSchedule, *, rounded: bool
) -> Union[HooklessSteps, str]:
    """Plan the steps of a pass without hooks; where it needs hooks, return the reason."""
    if plan.recomputes:
        return "activations are computed again in backward"
    steps = schedule.steps
    nodes = [(node, steps[node.number]) for node in plan.nodes if node.number in steps]
    factors = _factors(nodes, graph, plan)
    if isinstance(factors, str):
        return factors
    return HooklessSteps(factors, *_leaves(nodes, graph, plan, rounded=rounded), _between(schedule))


_Nodes = Sequence[Tuple[NodeStructure, Step]]


def _factors(nodes: _Nodes, graph: Graph, plan: GraphPlan) -> Union[SwappedFactors, str]:
    found: Dict[int, Tuple[LayerSlot, float]] = {}
    for node, step in nodes:
        for slot, alpha in zip(node.slots, step.alphas):
            known = found.setdefault(slot.factor, (slot, alpha))
            if known[1] != alpha:
                return f"{slot.layer} shares a weight with a layer of another scale"
    swapped = [(slot, alpha) for slot, alpha in found.values() if alpha != 1.0]
    for slot, _ in swapped:
        if slot.factor not in plan.swappable:
            return f"others read what {slot.layer} is multiplied by"
    return SwappedFactors(graph, swapped)


def _leaves(
    nodes: _Nodes, graph: Graph, plan: GraphPlan, *, rounded: bool
) -> Tuple[List[Contribution], Dict[int, List[Contribution]]]:
    """First contributions of all leaves, and those that follow and are unscaled one by one."""
    found: Dict[int, List[Contribution]] = {leaf: [] for leaf in plan.leaves}
    for node, step in nodes:
        for leaf in contributions_of(graph, plan, node, step):
            found[leaf.leaf].append(leaf)
    following: Dict[int, List[Contribution]] = {}
    for writers in found.values():
        # nnabla adds up what is exact; what is rounded, or carries another scale, is no sum yet.
        exact = not (rounded or any(leaf.half for leaf in writers)) and is_power_of_two(writers[0].scale)
        if not (exact and {leaf.scale for leaf in writers} == {writers[0].scale}):
            for leaf, after in zip(writers, writers[1:]):
                following.setdefault(leaf.function, []).append(after)
    return [writers[0] for writers in found.values()], following


def _between(schedule: ScaleSchedule) -> Dict[int, Tuple[Rescale, ...]]:
    """Rescales to run after each function, by its number; none is due before the first one."""
    found: Dict[int, Tuple[Rescale, ...]] = {}
    before = -1
    for node in schedule.nodes:
        step = schedule.steps.get(node.number)
        if step is not None and step.before:
            found[before] = found.get(before, ()) + step.before
        if step is not None and step.after:
            found[node.number] = step.after
        before = node.number
    return found
