# SPDX-License-Identifier: Apache-2.0
"""A backward pass with all its steps before and after nnabla's own backward."""

from __future__ import annotations

from typing import Mapping, Optional, Sequence, Tuple

from ..kernels.measurements import Measurements
from .held_scales import Brought, HeldScales
from .leaf_arrays import LeafArrays
from .leaf_gradients import LeafGradients
from .pass_context import PassContext
from .planned_steps import PlannedSteps
from .replayed_pass import ReplayedPass
from .scaled_factors import ScaledFactors


class PlannedPass(ReplayedPass):
    """Swaps all weights, lets nnabla's backward run, and unscales all gradients.

    It has what is needed for that and no more: on a small network, what Python does around backward is what
    the engine costs.

    Args:
        context: what the pass works with.
        held: the scales.
        steps: how they are applied.
        found: the gradients of the plan's leaves, as they are now.
        deferred: where parameter gradients are unscaled, if what comes of it is asked for at the end.
    """

    def __init__(
        self,
        context: PassContext,
        held: HeldScales,
        steps: PlannedSteps,
        found: LeafArrays,
        deferred: Optional[Measurements],
    ) -> None:
        super().__init__(context, held)
        self.seed, self._scales = steps.seed, steps.scales
        self._steps, self._masters, self._deferred = steps, found.arrays, deferred
        self._keys: Sequence[int] = ()
        self._largest: Sequence[float] = ()
        self._factors: Optional[ScaledFactors] = None
        if steps.factors:
            self._factors = ScaledFactors(context.kernels, context.pool, context.storage)
        self._leaves: Optional[LeafGradients] = None
        if not steps.leaves.are_written_directly(found):
            rounded = context.storage is not None
            self._leaves = LeafGradients(context.kernels, context.pool, rounded=rounded, deferred=deferred)

    def begin(self) -> None:
        """Do what is to be done before backward starts."""
        if self._factors is not None:
            self._factors.swap_all(self._steps.factors)
        if self._leaves is not None:
            for leaf in self._steps.leaves.leaves:
                self._leaves.take_leaf(leaf)

    @property
    def between(self) -> Mapping[int, Tuple[Brought, ...]]:
        """What is to be multiplied between two functions all the same, by the function after which."""
        between, keys = self._steps.between, self.plan.function_keys
        return {keys[number]: brought for number, brought in between.items()}

    def finish_last(self) -> None:
        """Do what is to be done when backward has run."""
        if self._leaves is not None:
            self._leaves.give_back()
            return
        self._keys, gradients = self._steps.leaves.written(self._masters)
        if self._deferred is not None:
            self._deferred.unscale_in_place(gradients)
        else:
            self._largest = self.kernels.unscale_in_place(gradients)

    def restore(self) -> None:
        """Put every swapped array back; harmless when none is swapped."""
        if self._factors is not None:
            self._factors.restore()
        if self._leaves is not None:
            self._leaves.restore()

    def finish(self) -> None:
        """End the pass, and collect the layers that were not finite."""
        keys, largest = self._keys, self._largest
        if self._leaves is not None:
            self._leaves.finish()
        found = self.statistics.finish()
        self.state_finite = found.watched_finite
        if self._leaves is not None:
            written, largest = self._leaves.results(found.largest)
            keys = [entry.key for entry in written]
        elif self._deferred is not None:
            largest = found.largest
        self._conclude(keys, largest)
