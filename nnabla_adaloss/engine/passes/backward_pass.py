# SPDX-License-Identifier: Apache-2.0
"""One backward pass with the scales of a schedule: it runs to its end, and reports what it has found."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from itertools import compress
from operator import attrgetter
from typing import Any, Callable, Dict, FrozenSet, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple

import nnabla as nn

from ...core.schedule import Rescale, ScaleSchedule
from ...graph.hooks import Hook, HookGuard, root_cause
from ...graph.loss import LossLike, LossSeed, Seed, run_backward
from ...graph.node import Node
from ...kernels.arrays import stored_dtype
from ..layer_watch import LayerWatch
from ..leaf_gradients import Contribution, ContributionAmax, LeafGradients, amax_by_contribution
from ..prepared_graph import PreparedGraph
from ..report import PassReport, amax_of_components, component_of_leaf, first_overflow, unseen_before
from ..statistics import Findings, Share

_persistent, _gradient, _zeroing = attrgetter("persistent"), attrgetter("grad"), attrgetter("zeroing")

Hooks = Sequence[Optional[Hook]]
"""Hooks that are called in turn; None is left out."""


class UserHooks(NamedTuple):
    """Who is called around the functions of a backward pass, besides the engine."""

    callbacks: Optional[Any] = None  # nnabla's communicator callbacks
    pre_hook: Optional[Hook] = None
    post_hook: Optional[Hook] = None

    @property
    def take_gradients(self) -> bool:
        """Whether parameter gradients are taken right after the function that writes them."""
        return self.callbacks is not None or self.post_hook is not None


NO_HOOKS = UserHooks()

Look = Callable[[Node, float], None]
"""Copies the arrays of a layer, for a method that looks at them."""


class PassRequest(NamedTuple):
    """What is asked of a pass, besides its scales."""

    clear_buffer: bool
    hooks: UserHooks = NO_HOOKS
    watch: Optional[LayerWatch] = None  # told of layers
    grad: Optional[Seed] = None  # seed gradient of the loss's shape; None for one
    measure_all: bool = False  # measure every gradient as it arrives
    share: Optional[Share] = None  # what is measured for the next choice; None: nothing
    look: Optional[Look] = None


LeafArrays = Tuple[List[nn.NdArray], bool]
"""Gradients of leaves, asked for once as nnabla makes a new object each time; whether all are lazily zero."""


def leaf_arrays(leaves: Iterable[nn.Variable]) -> LeafArrays:
    """The gradients of `leaves` as they are now."""
    arrays = list(map(_gradient, leaves))
    return arrays, all(map(_zeroing, arrays))


class BackwardPass(ABC):
    """A backward pass with the scales of a schedule."""

    kind = "hookless"
    """Or why there are hooks around single functions."""

    def __init__(self, prepared: PreparedGraph, request: PassRequest, schedule: ScaleSchedule) -> None:
        self.plan, self.kernels = prepared.plan, prepared.kernels
        self.statistics, self.storage = prepared.statistics, prepared.storage
        self._request, self._schedule, self._share = request, schedule, request.share
        self.seed_scale, self.scales = schedule.seed_scale, schedule.scales

    def run(self, loss: LossLike, seed: LossSeed) -> PassReport:
        """Run the backward of `loss`, and put back whatever was swapped, also when something raises."""
        request = self._request
        guard: Optional[HookGuard] = None
        pre: Optional[Hook] = None
        post: Optional[Hook] = None
        try:
            before, after = self.begin()
            if before or after:
                # nnabla does not stop backward when a hook raises: arrays are put back at once.
                guard = HookGuard(self.restore)
                pre, post = guard.chain(*before), guard.chain(*after)
            run_backward(
                loss,
                self.seed_scale,
                request.grad,
                request.clear_buffer,
                request.hooks.callbacks,
                pre,
                post,
                seed,
            )
            if guard is not None and guard.error is not None:
                raise guard.error
            self.end()
            report = self.finish()
            self._unscale_visible()
            return report
        except BaseException as raised:
            # What a hook raised comes first: nnabla hides it behind an error of its own.
            error = (guard and guard.error) or root_cause(raised)
        self.restore()
        # What is being measured is no matter of the next pass.
        self.statistics.finish(self._schedule.loss_weight_of)
        raise error

    @abstractmethod
    def begin(self) -> Tuple[Hooks, Hooks]:
        """Do what is to be done before backward starts; return the hooks before and after its functions."""

    @abstractmethod
    def end(self) -> None:
        """Put back what was swapped, and do what else is to be done when backward has run."""

    @abstractmethod
    def restore(self) -> None:
        """Put every swapped array back, whenever backward was broken off; harmless when none is swapped."""

    @abstractmethod
    def finish(self) -> PassReport:
        """End the pass, and report."""

    def _unscale_visible(self) -> None:
        """Unscale gradients that stay readable after the pass."""
        structure, variables, scales = self.plan.structure, self.plan.variables, self.scales
        pairs: Iterable[Tuple[nn.Variable, int]] = zip(variables, structure.gradients)
        if structure.kept_gradients and self._request.clear_buffer:
            pairs = [(v, p) for v, p in pairs if v.persistent or p in structure.kept_gradients]
        elif self._request.clear_buffer:
            pairs = compress(pairs, map(_persistent, variables))
        for variable, position in pairs:
            scale = scales.get(position, 1.0)
            if scale == 1.0:
                continue
            array = variable.grad
            if not array.clear_called and stored_dtype(array) is not None:
                self.kernels.scale_(array, 1.0 / scale)

    def rescale(self, rescales: Sequence[Rescale]) -> None:
        plan = self.plan
        for position, factor in rescales:
            array = plan.all_variables[position].grad
            if stored_dtype(array) is None:
                continue
            self.kernels.scale_(array, factor)
            self.storage.store_gradient(plan.keys[position], array)

    def _report_of(self, gradients: LeafGradients) -> PassReport:
        gradients.finish()
        findings, written = self.statistics.finish(self._schedule.loss_weight_of), gradients.written
        return self._report(
            findings, [w.contribution for w in written], amax_by_contribution(written, findings.largest)
        )

    def _report(
        self, findings: Findings, leaves: Sequence[Contribution], seen: Iterable[ContributionAmax]
    ) -> PassReport:
        measure_all, share = self._request.measure_all, self._share
        found_bad = findings.nonfinite or math.inf in findings.largest
        amax: Dict[int, float] = {}
        # Nearly always nothing is looked at.
        written = list(seen) if measure_all or share is not None or found_bad else []
        if measure_all or share is not None:
            counted = written if share is None else [one for one in written if one[0].leaf in share.leaves]
            gradients = self._gradients_seen(findings)
            amax = amax_of_components(self.plan.structure, self._schedule.components, gradients, counted)
        rounded_bad = self._rounded_nonfinite() if measure_all or found_bad else set()
        labels: Sequence[str] = ()
        first: Optional[int] = None
        suspected: FrozenSet[int] = frozenset()
        if found_bad or rounded_bad:
            bad_leaves = {one.leaf for one, found in zip(leaves, findings.largest) if found == math.inf}
            labels, first, suspected = self._overflow(findings.nonfinite, rounded_bad, bad_leaves, written)
        return PassReport(
            self.plan,
            self._schedule,
            self.scales,
            leaves,
            findings.largest,
            labels,
            amax,
            measure_all,
            first,
            suspected,
            self.kind,
            findings.state_finite is not False,
        )

    def _gradients_seen(self, findings: Findings) -> Iterable[Tuple[int, float]]:
        """The gradients of which something was seen, each with the largest magnitude, unscaled."""
        structure, keys, graph = self.plan.structure, self.plan.keys, self._schedule.components
        storage, single, limiting = self.storage, structure.single, structure.limiting_gradients
        measured = [one for one in findings.amax.items() if one[0] in limiting]
        # What functions in float hand on among themselves is not stored in the format. Single elements count
        # all the same where they are a component by themselves.
        apart = {p for p in single if p in graph.of and graph.of[p] in graph.single}
        if not storage.rounds:
            return [one for one in measured if one[0] in apart or one[0] not in structure.in_float]
        # Of single elements only what was measured counts: some are rounded only where there are hooks.
        rounded, scales = storage.gradients, self.scales
        found = [one for one in measured if one[0] in apart or keys[one[0]] in rounded]
        found += [
            (p, rounded[keys[p]].statistics.abs_max / scales[p])
            for p in structure.largest_gradients
            if p not in single and keys[p] in rounded
        ]
        return found

    def _rounded_nonfinite(self) -> Set[int]:
        """Positions of the gradients, but for leaves, that an emulated storage has seen not finite."""
        keys = self.plan.keys
        rounded = self.storage.gradients
        bad = {p for p in self.scales if keys[p] in rounded and rounded[keys[p]].statistics.nonfinite}
        return bad.difference(self.plan.structure.leaves)

    def _overflow(
        self, arrived: Set[int], rounded: Set[int], bad_leaves: Set[int], seen: Sequence[ContributionAmax]
    ) -> Tuple[Sequence[str], Optional[int], FrozenSet[int]]:
        structure, graph = self.plan.structure, self._schedule.components
        bad = arrived | rounded
        told = {contribution.leaf for contribution, _ in seen}
        written = [
            (contribution.leaf, contribution.function, amax == math.inf) for contribution, amax in seen
        ]
        for node in structure.nodes:
            others = [leaf for leaf in map(structure.leaf, node.leaves) if leaf not in told]
            written += [(leaf, node.number, leaf in bad_leaves) for leaf in others]
        finite: Set[int] = set()
        bad_functions: Dict[int, int] = {}
        for leaf, function, is_bad in written:
            component = component_of_leaf(structure, graph, leaf, function)
            if is_bad:
                bad_functions.setdefault(function, component)
            else:
                finite.add(component)
        raised = rounded - arrived if self._request.measure_all else set()
        first = first_overflow(structure, graph, bad, bad_functions, raised)
        labels = [
            node.label
            for node in structure.nodes
            if not bad.isdisjoint(node.outputs)
            # All uses of a weight share its master: where output gradients were seen, they tell more.
            or (not bad_leaves.isdisjoint(map(structure.leaf, node.leaves)) and not (bad and node.slots))
        ]
        # Where the gradient of a layer is not finite, that of its weight is not; not all functions have one.
        if first is None or self.storage.rounds or self._request.measure_all:
            return labels, first, frozenset()
        return labels, first, unseen_before(graph, first, finite - {first})
