# SPDX-License-Identifier: Apache-2.0
"""A backward pass with hooks around nnabla's functions: for what cannot be done before and after them all.

That is: scales that are chosen as it runs (`delay=0`, the first iteration, after an overflow), graphs that
allow no other pass, and users, monitors or communicators that look at single functions.
"""

from __future__ import annotations

import math
from typing import AbstractSet, Any, Callable, List, Mapping, Optional, Protocol, Sequence, Set, Tuple

from ...core.ada_loss import AdaLoss
from ...emulation.rounded_storage import RoundedStorage
from ...errors import GraphChangedError
from ...graph.node import Node, NodeStructure
from ...graph.plan import GraphPlan
from ...kernels.measurements import Measurements
from ..blame import first_overflow
from ..choosing import ScaleChooser
from ..component_pass import ComponentPass
from ..leaf_gradients import LeafGradients, Written, seen_of_leaves
from ..scaled_weights import ScaledWeights
from ..schedule import Rescale, ScaleSchedule, Step
from ..shares import Share
from ..statistics import Findings
from .backward_pass import BackwardPass, Hooks, PassContext, PassRequest, gradients_seen, nonfinite_in

Apply = Callable[[Rescale], None]
"""Multiplies a gradient, before the function of a step runs."""


class StepSource(Protocol):
    """Hands out what is done around each function."""

    @property
    def seed(self) -> float:
        """The scale of the loss gradient."""

    def step(self, node: NodeStructure, apply: Apply) -> Optional[Step]:
        """What is done around `node`, which runs next, when `before` has been applied; None: nothing."""

    def schedule(self) -> ScaleSchedule:
        """All steps, when the pass has ended."""


class ScheduledSteps:
    """The steps of a schedule.

    Args:
        schedule: the schedule.
    """

    def __init__(self, schedule: ScaleSchedule) -> None:
        self._schedule = schedule
        self.seed = schedule.seed

    def step(self, node: NodeStructure, apply: Apply) -> Optional[Step]:
        """What the schedule says; None: nothing."""
        step = self._schedule.steps.get(node.number)
        if step is not None:
            for rescale in step.before:
                apply(rescale)
        return step

    def schedule(self) -> ScaleSchedule:
        """The schedule."""
        return self._schedule


class ChosenSteps:
    """Steps that are chosen as the pass runs, from arrays as they are.

    Args:
        chooser: chooses them.
        ada_loss: remembers and reports what was decided.
    """

    def __init__(self, chooser: ScaleChooser, ada_loss: AdaLoss) -> None:
        self.chooser, self._ada_loss = chooser, ada_loss
        self.seed = chooser.seed

    def step(self, node: NodeStructure, apply: Apply) -> Optional[Step]:
        """What is decided now; None: the scale is passed on."""
        if self.chooser.passes_on(node):
            return None
        step = self.chooser.step(node, apply)
        self._ada_loss.take_over_all(self.chooser.decided)
        return step

    def schedule(self) -> ScaleSchedule:
        """What was decided."""
        return self.chooser.schedule()


class HookedPass(BackwardPass):
    """Applies the steps of a schedule, or those that are chosen as it runs, around each function.

    Args:
        context: what the pass works with.
        request: what is asked of it.
        source: the steps.
        deferred: where parameter gradients are unscaled, if what comes of it is asked for at the end.
        share: what is measured for later choices; None: what the choice of steps asks for.
    """

    def __init__(
        self,
        context: PassContext,
        request: PassRequest,
        source: StepSource,
        *,
        deferred: Optional[Measurements] = None,
        share: Optional[Share] = None,
    ) -> None:
        super().__init__(context, request, None, share)
        self._source, self._hooks, self._watch = source, request.hooks, request.watch
        self.chose = isinstance(source, ChosenSteps)
        self._nodes = self.plan.nodes
        # A pass that chooses its scales measures every gradient as it arrives.
        self._measured: AbstractSet[int] = frozenset(() if share is None else share.gradients)
        if isinstance(source, ChosenSteps) and source.chooser.components is not None:
            self._measured = self.plan.structure.limiting_gradients
        # The function that runs or ran last, if there is still something to do after it.
        self._unfinished: List[Tuple[Node, Tuple[Rescale, ...]]] = []
        self._weights = ScaledWeights(context.kernels, context.pool, context.storage)
        self._leaves = LeafGradients(
            context.kernels,
            context.pool,
            rounded=context.storage is not None,
            deferred=deferred,
            unscale_each=request.hooks.take_gradients,
        )

    @property
    def seed(self) -> float:
        """The scale of the loss gradient."""
        return self._source.seed

    def begin(self) -> Tuple[Hooks, Hooks]:
        """Do what is to be done before backward starts; return the hooks around its functions.

        Every call of a hook costs, also of one that does nothing. Where nobody looks at gradients between two
        functions, what is to be done after one is done before the next, and `end` does the rest.
        """
        if self._share is not None:
            self.statistics.measure((), [*self._share.activations, *self._share.weights])
        # nnabla computes activations again before it calls a hook: weights must be put back by then.
        looked_at = self._hooks.callbacks is not None or self._watch is not None or self.plan.recomputes
        if looked_at or self._hooks.post_hook is not None:
            return (self._prepare, self._hooks.pre_hook), (self._finish_last, self._hooks.post_hook)
        return (self._finish_last, self._prepare, self._hooks.pre_hook), ()

    def end(self) -> None:
        """Do what is to be done when backward has run."""
        self._finish_last()

    def restore(self) -> None:
        """Put every swapped array back; harmless when none is swapped."""
        self._weights.restore()
        self._leaves.restore()

    def finish(self) -> None:
        """End the pass: unscale what is left, and collect the layers that were not finite."""
        self._leaves.finish()
        findings = self.statistics.finish()
        self.state_finite = findings.watched_finite
        if isinstance(self._source, ChosenSteps):
            self._end_of_choice(self._source, findings)
            return
        self._schedule = self._source.schedule()
        entries, largest = self._leaves.results(findings.largest)
        seen = seen_of_leaves(entries, largest)
        if self._share is not None:
            self._learn(findings, seen)
        scales = [entry.scale for entry in entries]
        self._conclude([entry.leaf for entry in entries], largest, scales, seen)

    def _end_of_choice(self, source: ChosenSteps, findings: Findings) -> None:
        written = list(zip(*self._leaves.results(findings.largest)))
        entries, amax = [entry for entry, _ in written], [largest for _, largest in written]
        self._seen = [entry.leaf for entry in entries], amax, [entry.scale for entry in entries]
        structure, components = self.plan.structure, source.chooser.components
        bad = set(findings.nonfinite)
        labels = {
            structure.by_number[entry.function].label for entry, largest in written if largest == math.inf
        }
        if components is not None:
            scales = source.chooser.scales
            bad |= measure_components(self.plan, components, scales, findings, written, self.storage)
            measured = source.chooser.measures_loss
            raised = bad - findings.nonfinite if measured else set()
            leaves = [(entry.leaf, entry.function) for entry, largest in written if largest == math.inf]
            components.overflowed = first_overflow(self.plan, components, bad, leaves, raised=raised)
        self.components, self._schedule = components, source.schedule()
        if bad or labels:
            self.found_inf = [
                node.label
                for node in structure.nodes
                if not bad.isdisjoint(node.outputs)
                # All uses of a weight share its master: where output gradients were seen, they tell more.
                or (node.label in labels and not (bad and node.slots))
            ]

    # Around single functions.

    def _prepare(self, f: Any) -> None:
        node = self._nodes.get(hash(f))
        if node is None:
            raise GraphChangedError.at(f.info.type_name)
        outputs = [p for p in node.structure.outputs if p in self._measured] if self._measured else ()
        chooser = self._source.chooser if isinstance(self._source, ChosenSteps) else None
        if outputs and chooser is not None:
            # As it arrives: what it is multiplied by for this function may be too much.
            self._measure(outputs, chooser.scales)
        step = self._source.step(node.structure, self._rescale_one)
        if outputs and chooser is None:
            self._measure(outputs, self._source.schedule().scales)
        if step is None:
            return
        self._unfinished[:] = [(node, step.after)]
        for index, (scaling, alpha) in enumerate(zip(node.scalings, step.alphas)):
            if self._watch is not None:
                self._watch.scheduled(scaling, step.scale, alpha)
            if alpha != 1.0:
                self._weights.swap(scaling, alpha, index)
        if node.leaves:
            self._leaves.take(node, step.scale, step.targets(node.structure))

    def _measure(self, positions: Sequence[int], scales: Mapping[int, float]) -> None:
        self.statistics.measure([(p, scales[p]) for p in positions if p in scales], ())

    def _finish_last(self, _: Any = None) -> None:
        if not self._unfinished:
            return
        node, after = self._unfinished.pop()
        self._weights.restore()
        if self._watch is not None:
            self._watch.ran(node)
        self.rescale(after)
        if node.leaves:
            self._leaves.give_back()

    def _rescale_one(self, rescale: Rescale) -> None:
        self.rescale((rescale,))


def measure_components(
    plan: GraphPlan,
    components: ComponentPass,
    scales: Mapping[int, float],
    findings: Findings,
    unscaled: Sequence[Tuple[Written, float]],
    storage: Optional[RoundedStorage],
) -> Set[int]:
    """Have components take note of what a pass has measured.

    Args:
        plan: the graph.
        components: its components.
        scales: what each gradient carries in the end, by position.
        findings: the gradients that were measured.
        unscaled: those of leaves, and the largest magnitude of each, divided by its scale.
        storage: an emulated storage, which has seen every gradient as it was stored last, except the one that
            backward began with; or None.

    Returns:
        Positions of the variables whose gradients were not finite, except leaves.
    """
    components.measure_gradients(gradients_seen(plan, scales, findings.amax, storage))
    entries, largest = [entry for entry, _ in unscaled], [amax for _, amax in unscaled]
    components.measure_leaves(plan.structure, seen_of_leaves(entries, largest))
    return findings.nonfinite | nonfinite_in(storage, plan, scales)
