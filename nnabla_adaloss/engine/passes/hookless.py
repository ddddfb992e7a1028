# SPDX-License-Identifier: Apache-2.0
"""The backward pass of nearly all iterations: nnabla's own, without a hook.

All weights are swapped before it, all gradients are unscaled after it. What is measured for later choices is
kept by nnabla until the pass ends, instead of being freed on the way.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import nnabla as nn

from ...graph.structure import GraphStructure
from ...kernels.interface import GradientsInPlace
from ..leaf_gradients import LeafGradients, LeafSeen, TakenLeaf, seen_of_leaves
from ..report import LeavesSeen, PassReport
from ..scaled_weights import ScaledWeights, SwappedFactors
from ..schedule import Rescale, ScaleSchedule
from .backward_pass import BackwardPass, Hooks, LeafArrays, PassContext, PassRequest

_zeroing, _size = attrgetter("zeroing"), attrgetter("size")


class HooklessLeaves:
    """Leaves that are taken at once; what is known of them is kept from pass to pass."""

    def __init__(self, leaves: Sequence[TakenLeaf]) -> None:
        self.leaves = leaves
        self._by_position = {leaf.leaf: leaf for leaf in leaves}
        self._positions, self._scales = [leaf.leaf for leaf in leaves], [leaf.scale for leaf in leaves]
        self._direct = not any(leaf.half for leaf in leaves)
        self._gradients: Optional[GradientsInPlace] = None
        self._sizes: List[int] = []

    def are_written_directly(self, found: LeafArrays) -> bool:
        """Whether nnabla writes them to the masters themselves, and adds them to nothing."""
        return found[1] and self._direct

    def written(self, masters: List[nn.NdArray]) -> Tuple[List[int], GradientsInPlace]:
        """Positions and gradients of what was written to `masters`, which are to be unscaled in place."""
        # An array that is still zeroing was not written.
        if any(map(_zeroing, masters)):
            kept = [(leaf, master) for leaf, master in zip(self.leaves, masters) if not master.zeroing]
            return [leaf.leaf for leaf, _ in kept], _in_place(kept)
        # Kernels trust the sizes, and `reset_shape` may have changed them.
        sizes = list(map(_size, masters))
        if self._gradients is None or self._sizes != sizes:
            self._sizes, self._gradients = sizes, _in_place(list(zip(self.leaves, masters)))
        self._gradients.arrays = masters
        return self._positions, self._gradients

    def scales(self, written: Sequence[int]) -> Sequence[float]:
        """What the gradients of leaves carry, by position."""
        if written is self._positions:
            return self._scales
        return [self._by_position[position].scale for position in written]

    def seen(self, written: Sequence[int], largest: Sequence[float]) -> Iterable[LeafSeen]:
        """What was written to the gradients of leaves, by position, and the largest magnitude of each."""
        for position, amax in zip(written, largest):
            leaf = self._by_position[position]
            yield LeafSeen(position, leaf.function, amax, leaf.scale)


def _in_place(pairs: Sequence[Tuple[TakenLeaf, nn.NdArray]]) -> GradientsInPlace:
    return GradientsInPlace([master for _, master in pairs], [leaf.scale for leaf, _ in pairs])


class HooklessSteps(NamedTuple):
    """What a pass without hooks does."""

    factors: SwappedFactors  # weights to be swapped
    leaves: HooklessLeaves  # leaves that get a gradient
    seed: float  # what the loss gradient starts with
    scales: Mapping[int, float]  # what each gradient carries in the end, by position
    between: Mapping[int, Tuple[Rescale, ...]]  # rescales to run after a function, by its number

    def hold_for(self, structure: GraphStructure) -> bool:
        """Whether they hold for another graph of this structure: all weights are the same there."""
        return structure.kept_keys.issuperset(self.factors.keys)


class HooklessPass(BackwardPass):
    """Swaps all weights, lets nnabla's backward run, and unscales all gradients.

    It has what is needed for that and no more: on a small network, what Python does around backward is what
    the engine costs.
    """

    def __init__(
        self,
        context: PassContext,
        request: PassRequest,
        schedule: ScaleSchedule,
        steps: HooklessSteps,
        found: LeafArrays,
    ) -> None:
        super().__init__(context, request, schedule, steps.seed, steps.scales)
        self._steps, self._masters, self._measurements = steps, found[0], context.measurements
        self._written: Sequence[int] = ()
        # Variables whose gradients nnabla would free before they are measured.
        self._kept: List[nn.Variable] = []
        self._weights: Optional[ScaledWeights] = None
        if steps.factors.keys:
            self._weights = ScaledWeights(context.kernels, context.pool, context.storage)
        self._leaves: Optional[LeafGradients] = None
        if not steps.leaves.are_written_directly(found):
            rounded = context.storage is not None
            self._leaves = LeafGradients(context.kernels, context.pool, context.measurements, rounded=rounded)

    def begin(self) -> Tuple[Hooks, Hooks]:
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
            return (), ()
        keys = self.plan.function_keys
        after = {keys[number]: rescales for number, rescales in between.items()}.get

        def multiply(f: object) -> None:
            rescales = after(hash(f))
            if rescales is not None:
                self.rescale(rescales)

        return (), (multiply,)

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

    def restore(self) -> None:
        """Put every swapped array back; harmless when none is swapped."""
        if self._kept:
            self._release()
        if self._weights is not None:
            self._weights.restore()
        if self._leaves is not None:
            self._leaves.restore()

    def finish(self) -> PassReport:
        """End the pass, and report."""
        if self._leaves is not None:
            self._leaves.finish()
        found = self.statistics.finish()
        if self._leaves is None:
            written, largest = self._written, found.largest
            leaves = LeavesSeen(written, largest, self._steps.leaves.scales(written))
            return self._report(found, leaves, self._steps.leaves.seen(written, largest))
        entries = self._leaves.written
        leaves = LeavesSeen([e.leaf for e in entries], found.largest, [e.scale for e in entries])
        return self._report(found, leaves, seen_of_leaves(entries, found.largest))

    def _release(self) -> None:
        while self._kept:
            self._kept[-1].persistent = False
            self._kept.pop()
