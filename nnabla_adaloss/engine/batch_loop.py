# SPDX-License-Identifier: Apache-2.0
"""Loop over the passes of a batch, until its verdict is final."""

from __future__ import annotations

from typing import Any, Callable, Iterable, NamedTuple, Tuple

import nnabla as nn

from ..core.verdict import Facts, PassVerdict, Rules, judge
from ..undo.snapshot import ArraySnapshot
from .adaptive_loss_scaling import AdaptiveLossScaling


class Outcome(NamedTuple):
    """Outcome of a batch, or of its last pass, on this rank."""

    verdict: PassVerdict = PassVerdict.GOOD
    facts: Facts = Facts()  # basis of the verdict
    layers: Tuple[str, ...] = ()  # all functions with nonfinite gradients, in backward order
    component: str = ""  # first component with a nonfinite gradient; empty if unknown
    attempt: int = 0  # number of the pass in its iteration

    @property
    def lowered(self) -> bool:
        """True if the batch's next try has lower scales, lowered or chosen from its own measurements."""
        return bool(self.facts.lowered or self.facts.fits)

    @property
    def fault(self) -> str:
        """Function of forward with a nonfinite array, in words, if that made gradients nonfinite; else ""."""
        return (self.facts.fault or "") if self.verdict.of_forward else ""

    @property
    def where(self) -> str:
        """First layer with a nonfinite gradient, and the first component with one, in words."""
        if not self.layers:
            return "none, only the loss was NaN" if self.facts.overflowed else "on another rank"
        return f"{self.layers[0]} (component {self.component})" if self.component else self.layers[0]


class BatchLoop(NamedTuple):
    """Runs the batches of one loss."""

    scaling: AdaptiveLossScaling
    run_pass: Callable[..., Any]  # runs forward and backward; `rerun=True`: over the same batch again
    parameters: Callable[[], Iterable[nn.Variable]]  # parameters whose gradients matter
    smallest_scale: float
    lower: Callable[[], bool] = lambda: False  # lowers other scales, if no component's can be lowered
    on_overflow: Callable[[Outcome], Any] = lambda outcome: None  # after each pass that overflowed
    on_repeat: Callable[[Outcome], Any] = lambda outcome: None  # before each repeated pass

    def run(self, rules: Rules) -> Outcome:
        """Run a batch until its gradients can be used, or no rule allows another pass."""
        self.run_pass(rerun=False)
        return self.go_on(rules)

    def go_on(self, rules: Rules) -> Outcome:
        """Continue a batch after its first pass."""
        repeats = 0
        while True:
            outcome = self.conclude(self._facts(repeats), rules)
            # An update with an earlier lost batch is lost anyway, and that batch's overflow was reported.
            if outcome.facts.overflowed and not rules.update_lost:
                self.on_overflow(outcome)
            if outcome.verdict is not PassVerdict.RERUN:
                return outcome
            repeats += 1
            self.on_repeat(outcome)
            self.scaling.guard.undo_batch()
            self.run_pass(rerun=True)

    def conclude(self, facts: Facts, rules: Rules) -> Outcome:
        """Measure, probe, or lower scales, as `judge` asks, until the batch is good, lost, or to be rerun."""
        scaling, outcome = self.scaling, self._last_pass()
        while True:
            verdict = judge(facts, rules)
            if verdict is PassVerdict.MEASURE:
                scaling.guard.undo_batch()
                self.run_pass(rerun=True)
                measured = self._facts(facts.repeats)
                if measured.overflowed:
                    facts, outcome = measured, self._last_pass()
                else:
                    # Scales from the batch's own measurements fit. Still it has overflowed: it runs again
                    # with these scales, or is lost if `rules` forbid repeats.
                    facts = facts._replace(fits=True)
            elif verdict is PassVerdict.CHECK_FORWARD:
                facts = facts._replace(fault=scaling.find_fault())
            elif verdict is PassVerdict.PROBE:
                facts = facts._replace(fits_smallest=self._fits_smallest())
            elif verdict is PassVerdict.LOWER:
                facts = facts._replace(lowered=scaling.after_overflow() or self.lower())
            else:
                if verdict.lowers_nothing:
                    # No scale helps this batch: the next ones get the scales from before it.
                    scaling.components = scaling.components._replace(provisional={}, origins=frozenset())
                return outcome._replace(verdict=verdict, facts=facts)

    def _last_pass(self) -> Outcome:
        """Outcome of the last pass, without a verdict."""
        scaling = self.scaling
        layers, component = tuple(scaling.found_inf), scaling.result.component or ""
        return Outcome(layers=layers, component=component, attempt=scaling.components.attempt)

    def _facts(self, repeats: int) -> Facts:
        """Collect facts about the last pass over a batch, which has run again `repeats` times."""
        scaling = self.scaling
        if scaling.overflowed(self.parameters):
            return self.overflow_facts(repeats)
        # Far too low scales are accepted if gradients were not saved before the batch: it cannot run again.
        return Facts(repeats, calibrated=scaling.calibrated or not scaling.guard.can_undo_batch)

    def overflow_facts(self, repeats: int = 0) -> Facts:
        """Collect facts about the last pass over a batch, in which gradients overflowed."""
        scaling = self.scaling
        loss_is_nan, loss_is_infinite = scaling.result.loss_is_nan, scaling.result.loss_is_infinite
        return Facts(
            repeats,
            overflowed=True,
            can_measure_more=scaling.can_measure_more,
            loss_is_nan=loss_is_nan,
            loss_is_infinite=loss_is_infinite,
            forward_is_suspect=loss_is_nan or loss_is_infinite or scaling.forward_is_suspect,
            lost_recently=scaling.components.lost_recently,
        )

    def _fits_smallest(self) -> bool:
        """Run the batch again at the smallest scale, and check whether its gradients are finite."""
        scaling = self.scaling
        scaling.guard.rewind()
        # The last backward has freed the activations.
        scaling.forward(clear_no_need_grad=True)
        leaves = scaling.graph.by_key(scaling.plan.leaves).values()
        gradients = [v.grad for v in {*leaves, *self.parameters()}]
        snapshot = ArraySnapshot(scaling.kernels)
        snapshot.save(gradients)
        # Backward adds to gradients, or does not reach them: infinities of the overflow would stay.
        for gradient in gradients:
            gradient.zero()
        scaling.probe(self.smallest_scale)
        finite = scaling.kernels.gradients_are_finite(self.parameters())
        if finite:
            # Most of these have underflowed: no rank may use them for an update. The gradients from before
            # show that the batch has overflowed.
            snapshot.restore()
        return finite
