# SPDX-License-Identifier: Apache-2.0
"""The backward pass of nearly all iterations: nnabla's own, without a hook.

Only functions are followed by a call where gradients are multiplied between two of them, or where several add
to one leaf and each contribution is rounded.
"""

from __future__ import annotations

from functools import partial
from typing import List, Optional, Sequence, Tuple

import nnabla as nn

from ...core.schedule import ScaleSchedule
from ..hookless_steps import HooklessSteps
from ..leaf_gradients import Contribution, LeafGradients
from ..prepared_graph import PreparedGraph
from ..report import PassReport
from ..scaled_weights import ScaledWeights
from .backward_pass import BackwardPass, Hooks, LeafArrays, PassRequest


class HooklessPass(BackwardPass):
    """Swaps all weights, lets nnabla's backward run, and unscales all gradients."""

    def __init__(
        self,
        prepared: PreparedGraph,
        request: PassRequest,
        schedule: ScaleSchedule,
        steps: HooklessSteps,
        found: LeafArrays,
    ) -> None:
        super().__init__(prepared, request, schedule)
        self._steps, self._masters, self._measurements = steps, found[0], prepared.measurements
        self._written: Sequence[Contribution] = ()
        # The masters, while nnabla writes to them.
        self._scaled: Sequence[nn.NdArray] = ()
        # Variables whose gradients nnabla would free before they are measured.
        self._kept: List[nn.Variable] = []
        self._weights: Optional[ScaledWeights] = None
        if steps.factors.keys:
            self._weights = ScaledWeights(prepared.kernels, prepared.pool, prepared.storage)
        self._leaves: Optional[LeafGradients] = None
        if not (found[1] and steps.leaves.direct):
            self._leaves = LeafGradients(
                prepared.kernels, prepared.pool, prepared.measurements, rounded=prepared.storage.rounds
            )

    def begin(self) -> Tuple[Hooks, Hooks]:
        share = self._share
        if share is not None:
            if share.activations:
                self.statistics.measure((), share.activations)
            self._keep(share.gradients)
        if self._weights is not None:
            self._weights.swap_all(self._steps.factors)
        if self._leaves is not None:
            self._leaves.take(*self._steps.leaves.leaves)
        else:
            self._scaled = self._masters
        between, following = self._steps.between, self._steps.leaves.following
        if not (between or following):
            return (), ()
        keys = self.plan.function_keys
        numbers = {keys[number]: number for number in (*between, *following)}
        if self.storage.rounds:
            # An emulated storage looks at each function anyway.
            self.storage.after = {key: partial(self._after, number) for key, number in numbers.items()}
            return (), ()

        def after(f: object) -> None:
            number = numbers.get(hash(f))
            if number is not None:
                self._after(number)

        return (), (after,)

    def _after(self, number: int) -> None:
        self.rescale(self._steps.between.get(number, ()))
        following = self._steps.leaves.following.get(number)
        if following is not None and self._leaves is not None:
            self._leaves.hand_on(following)

    def _keep(self, positions: Sequence[int]) -> None:
        """Have nnabla keep gradients until they are measured, except those that an emulated storage sees."""
        variables, keys, storage = self.plan.all_variables, self.plan.keys, self.storage
        for position in positions:
            variable = variables[position]
            seen = storage.gradient_statistics(keys[position]) is not None
            if not seen and not variable.persistent:
                # Noted before it is set: a signal may interrupt us between any two lines.
                self._kept.append(variable)
                variable.persistent = True

    def end(self) -> None:
        share = self._share
        self.storage.after = {}
        if self._weights is not None:
            self._weights.restore()
        if share is not None:
            arrived = [(p, self.scales[p]) for p in share.gradients if p in self.scales]
            self.statistics.measure(arrived, share.weights)
            kept = self._kept[:]
            self._release()
            if self._request.clear_buffer:
                for variable in kept:
                    variable.grad.clear()
        if self._leaves is not None:
            self._leaves.give_back()
            return
        self._written, gradients = self._steps.leaves.written(self._masters)
        self._measurements.unscale_in_place(gradients)
        self._scaled = ()

    def restore(self) -> None:
        self.storage.after = {}
        if self._kept:
            self._release()
        if self._weights is not None:
            self._weights.restore()
        if self._leaves is not None:
            self._leaves.restore()
        for master in self._scaled:
            # As it was: a pass that was given up has written part of it.
            master.zero()

    def finish(self) -> PassReport:
        if self._leaves is not None:
            return self._report_of(self._leaves)
        found = self.statistics.finish(self._schedule.loss_weight_of)
        return self._report(found, self._written, zip(self._written, found.largest))

    def _release(self) -> None:
        while self._kept:
            self._kept[-1].persistent = False
            self._kept.pop()
