# SPDX-License-Identifier: Apache-2.0
"""The backward pass of nearly all iterations: nnabla's own, without a hook.

All weights are swapped before it, all gradients are unscaled after it. What is measured for later choices is
kept by nnabla until the pass ends, instead of being freed on the way.
"""

from __future__ import annotations

from typing import Dict, List, Mapping, Optional, Sequence, Tuple

import nnabla as nn

from ...graph.hooks import Hook, HookGuard
from ...graph.plan import LeafArrays
from ...kernels.measurements import Measurements
from ..leaf_gradients import LeafGradients
from ..scaled_weights import ScaledWeights
from ..schedule import ScaleSchedule
from ..shares import Share
from .hookless_steps import HooklessSteps
from .result import BackwardPass, PassContext


class HooklessPass(BackwardPass):
    """Swaps all weights, lets nnabla's backward run, and unscales all gradients.

    It has what is needed for that and no more: on a small network, what Python does around backward is what
    the engine costs.

    Args:
        context: what the pass works with.
        schedule: the scales.
        steps: how they are applied.
        found: the gradients of the plan's leaves, as they are now.
        deferred: where parameter gradients are unscaled, if what comes of it is asked for at the end.
        share: what is measured; None: nothing.
        clear_buffer: whether nnabla frees what backward no longer needs.
    """

    hookless = True

    def __init__(
        self,
        context: PassContext,
        schedule: ScaleSchedule,
        steps: HooklessSteps,
        found: LeafArrays,
        deferred: Optional[Measurements],
        share: Optional[Share],
        *,
        clear_buffer: bool,
    ) -> None:
        super().__init__(context, schedule, share)
        self._steps, self._masters, self._deferred = steps, found.arrays, deferred
        self._clear_buffer = clear_buffer
        self._written: Sequence[int] = ()
        self._largest: Sequence[float] = ()
        # Variables whose gradients nnabla would free before they are measured.
        self._kept: List[nn.Variable] = []
        self._weights: Optional[ScaledWeights] = None
        if steps.factors.keys:
            self._weights = ScaledWeights(context.kernels, context.pool, context.storage)
        self._leaves: Optional[LeafGradients] = None
        if not steps.leaves.are_written_directly(found):
            rounded = context.storage is not None
            self._leaves = LeafGradients(context.kernels, context.pool, rounded=rounded, deferred=deferred)

    @property
    def seed(self) -> float:
        """The scale of the loss gradient."""
        return self._steps.seed

    @property
    def scales(self) -> Mapping[int, float]:
        """What each gradient carries in the end, by position."""
        return self._steps.scales

    def begin(self, guard: HookGuard) -> Tuple[Optional[Hook], Optional[Hook]]:
        """Do what is to be done before backward starts; return the hooks it needs: hardly any."""
        share = self._share
        if share is not None:
            if share.activations:
                self.statistics.measure((), share.activations)
            self._keep(share.gradients)
        if self._weights is not None:
            self._weights.swap_all(self._steps.factors)
        if self._leaves is not None:
            for leaf in self._steps.leaves.leaves:
                self._leaves.take_leaf(leaf)
        between = self._steps.between
        if not between:
            return None, None
        keys = self.plan.function_keys
        after = {keys[number]: rescales for number, rescales in between.items()}.get

        def multiply(f: object) -> None:
            rescales = after(hash(f))
            if rescales is not None:
                self.rescale(rescales)

        return None, guard.chain(multiply)

    def _keep(self, positions: Sequence[int]) -> None:
        """Have nnabla keep gradients until they are measured, except those that an emulated storage sees."""
        variables, keys, storage = self.plan.all_variables, self.plan.keys, self.storage
        for position in positions:
            variable = variables[position]
            seen = storage is not None and storage.gradient_statistics(keys[position]) is not None
            if not seen and not variable.persistent:
                # Noted before it is set: a signal may interrupt us between any two lines.
                self._kept.append(variable)
                variable.persistent = True

    def end(self) -> None:
        """Do what is to be done when backward has run."""
        share = self._share
        if self._weights is not None:
            self._weights.restore()
        if share is not None:
            scales = self._steps.scales
            arrived = [(p, scales[p]) for p in share.gradients if p in scales]
            self.statistics.measure(arrived, share.weights)
            kept = self._kept[:]
            self._release()
            if self._clear_buffer:
                for variable in kept:
                    variable.grad.clear()
        if self._leaves is not None:
            self._leaves.give_back()
            return
        self._written, gradients = self._steps.leaves.written(self._masters)
        if self._deferred is not None:
            self._deferred.unscale_in_place(gradients)
        else:
            self._largest = self.kernels.unscale_in_place(gradients)

    def restore(self) -> None:
        """Put every swapped array back; harmless when none is swapped."""
        if self._kept:
            self._release()
        if self._weights is not None:
            self._weights.restore()
        if self._leaves is not None:
            self._leaves.restore()

    def finish(self) -> None:
        """End the pass, and collect the layers that were not finite."""
        written, largest = self._written, self._largest
        if self._leaves is not None:
            self._leaves.finish()
        found = self.statistics.finish()
        self.state_finite = found.watched_finite
        alone: Dict[int, float] = {}
        if self._leaves is not None:
            entries, largest = self._leaves.results(found.largest)
            written = [entry.leaf for entry in entries]
            alone = {entry.leaf: amax for entry, amax in zip(entries, largest) if entry.alone}
        elif self._deferred is not None:
            largest = found.largest
        if self._share is not None:
            if self._leaves is None:
                alone = dict(zip(written, largest))
            self._learn(found, alone, self._steps.leaves.scales)
        self._conclude(written, largest)

    def _release(self) -> None:
        while self._kept:
            self._kept[-1].persistent = False
            self._kept.pop()
