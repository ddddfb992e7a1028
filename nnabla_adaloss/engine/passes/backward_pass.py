# SPDX-License-Identifier: Apache-2.0
"""One backward pass: it runs from its first function to the end, and knows its scales and what it found."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import cached_property
from itertools import compress
from operator import attrgetter, mul
from typing import AbstractSet, Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

import nnabla as nn

from ...emulation.rounded_storage import RoundedStorage
from ...graph.components import Components
from ...graph.hooks import Hook, HookGuard, root_cause
from ...graph.loss import LossLike, LossSeed, Seed, run_backward
from ...graph.plan import GraphPlan
from ...kernels.arrays import stored_dtype
from ...kernels.interface import Kernels
from ...kernels.scratch import ScratchPool
from ..blame import first_overflow, unseen_before
from ..component_pass import ComponentPass
from ..layer_watch import LayerWatch
from ..leaf_gradients import LeafSeen
from ..schedule import Rescale, ScaleSchedule
from ..shares import Share
from ..statistics import Findings, StatisticsSource

_persistent, _gradient, _zeroing = attrgetter("persistent"), attrgetter("grad"), attrgetter("zeroing")

Hooks = Sequence[Optional[Hook]]
"""Hooks that are called in turn; None is left out."""


class UserHooks(NamedTuple):
    """Who is called around the functions of a backward pass, besides the engine.

    Attributes:
        callbacks: nnabla's communicator callbacks, called after each function.
        pre_hook: the user's own, called before each function.
        post_hook: the user's own, called after each function.
    """

    callbacks: Optional[Any] = None
    pre_hook: Optional[Hook] = None
    post_hook: Optional[Hook] = None

    @property
    def take_gradients(self) -> bool:
        """Whether parameter gradients are taken right after the function that writes them."""
        return self.callbacks is not None or self.post_hook is not None


NO_HOOKS = UserHooks()


class PassRequest(NamedTuple):
    """What is asked of a pass, besides its scales.

    Attributes:
        clear_buffer: free what backward no longer needs.
        hooks: the user's own.
        watch: who is told of layers; None: nobody.
        grad: seed gradient of the loss's shape; None for one.
    """

    clear_buffer: bool
    hooks: UserHooks = NO_HOOKS
    watch: Optional[LayerWatch] = None
    grad: Optional[Seed] = None


class LeafArrays(NamedTuple):
    """Gradients of leaves: nnabla makes a new object for each that is asked for, so they are asked for once.

    Attributes:
        arrays: the gradient of each.
        all_zero: whether all of them are lazily zero.
    """

    arrays: List[nn.NdArray]
    all_zero: bool


def leaf_arrays(leaves: Iterable[nn.Variable]) -> LeafArrays:
    """The gradients of `leaves` as they are now.

    Example:
        >>> w = nn.Variable((2,), need_grad=True)
        >>> w.grad.zero()
        >>> leaf_arrays([w]).all_zero
        True
    """
    arrays = list(map(_gradient, leaves))
    return LeafArrays(arrays, all(map(_zeroing, arrays)))


class PassContext(NamedTuple):
    """What all passes of one engine share.

    Attributes:
        plan: the graph.
        kernels: passes over memory.
        pool: where scratch arrays come from.
        statistics: measures arrays.
        storage: an emulated storage, or None.
        components: the components of the graph.
    """

    plan: GraphPlan
    kernels: Kernels
    pool: ScratchPool
    statistics: StatisticsSource
    storage: Optional[RoundedStorage]
    components: Components


def gradients_seen(
    plan: GraphPlan,
    scales: Mapping[int, float],
    amax: Mapping[int, float],
    storage: Optional[RoundedStorage],
) -> List[Tuple[int, float, float]]:
    """The gradients of which something was seen: position, largest magnitude as stored, scale.

    Args:
        plan: the graph.
        scales: what each gradient carries in the end, by position.
        amax: the largest magnitude, divided by the scale, of those that were measured.
        storage: an emulated storage, which has seen every gradient as it was stored last; or None. Of single
            elements only what was measured counts: some of them are multiplied, and rounded, only where hooks
            look at each function.
    """
    single, keys = plan.structure.single, plan.keys
    found = [(p, largest * scales[p], scales[p]) for p, largest in amax.items() if p in scales]
    if storage is not None:
        seen = storage.gradient_statistics
        # What functions in float hand on among themselves is not stored in the format.
        found = [one for one in found if one[0] in single or seen(keys[one[0]]) is not None]
        rounded = ((p, seen(keys[p]), scale) for p, scale in scales.items() if p not in single)
        found += [(p, one.abs_max, scale) for p, one, scale in rounded if one is not None]
    return found


def nonfinite_in(storage: Optional[RoundedStorage], plan: GraphPlan, positions: Iterable[int]) -> Set[int]:
    """Those of some gradients that an emulated storage has seen not finite. Leaves are left out: they are
    checked where they are unscaled.
    """
    if storage is None:
        return set()
    seen = ((p, storage.gradient_statistics(plan.keys[p])) for p in positions)
    return {p for p, one in seen if one is not None and one.nonfinite}.difference(plan.structure.leaves)


class BackwardPass(ABC):
    """A backward pass and its results.

    Args:
        context: what the pass works with.
        request: what is asked of it.
        schedule: its scales; None while they are chosen as it runs.
        share: what it measures for later choices; None: nothing, or what the choice of its scales asks for.

    Attributes:
        found_inf: layers whose gradients are not finite, first in backward order first.
        state_finite: whether what forward has written is finite; None: that was not checked.
        components: what was measured of components; None: nothing.
    """

    hookless = False
    """Whether nothing is done between two functions."""

    chose = False
    """Whether the scales are chosen while the pass runs."""

    def __init__(
        self,
        context: PassContext,
        request: PassRequest,
        schedule: Optional[ScaleSchedule],
        share: Optional[Share] = None,
    ) -> None:
        self.plan, self.kernels, _, self.statistics, self.storage, self._components = context
        self._request, self._schedule, self._share = request, schedule, share
        self.found_inf: List[str] = []
        self._seen: Tuple[Sequence[int], Sequence[float], Sequence[float]] = (), (), ()
        self.state_finite: Optional[bool] = None
        self.components: Optional[ComponentPass] = None

    @property
    def schedule(self) -> ScaleSchedule:
        """The scales of the pass."""
        assert self._schedule is not None, "scales are chosen while the pass runs"
        return self._schedule

    @property
    def seed(self) -> float:
        """The scale of the loss gradient."""
        return self.schedule.seed

    @property
    def scales(self) -> Mapping[int, float]:
        """What each gradient carries in the end, by position."""
        return self.schedule.scales

    @cached_property
    def scales_by_key(self) -> Dict[int, float]:
        """What each gradient carries in the end, by variable key."""
        keys = self.plan.keys
        return {keys[position]: scale for position, scale in self.scales.items()}

    @property
    def measures_loss(self) -> bool:
        """Whether the loss scale was chosen from what was measured."""
        return self.schedule.fixed_scale is None

    @property
    def nonzero(self) -> AbstractSet[int]:
        """Keys of the leaves whose gradients are not all zeros."""
        leaves, largest, _ = self._seen
        # Mostly those of all leaves.
        if all(largest) and len({*leaves}) == len(self.plan.leaves):
            return self.plan.leaves.keys()
        keys = self.plan.keys
        return {keys[position] for position in compress(leaves, largest)}

    def faint(self, floor: float) -> Sequence[str]:
        """The components whose gradients have underflowed: all, where no leaf's gradient as it was stored has
        come to `floor`; else those in which all are zero, though they follow from others that are not.

        A branch that is absent from a batch is zero from its beginning.
        """
        leaves, largest, scales = self._seen
        components, stored = self._components, list(map(mul, largest, scales))
        # As nearly always.
        if stored and min(stored) >= floor:
            return ()
        if max(stored, default=0.0) < floor:
            return components.names
        if min(stored):
            return ()
        of, next_ = components.leaves, components.next
        present = {of[leaf] for leaf, one in zip(leaves, stored) if one}
        absent = {of[leaf] for leaf in leaves} - present
        return [components.names[i] for i in absent if any(i in next_[index] for index in present)]

    @property
    def nonfinite(self) -> AbstractSet[int]:
        """Keys of the leaves whose gradients are not finite."""
        if not self.found_inf:
            return frozenset()
        keys, (leaves, largest, _) = self.plan.keys, self._seen
        return {keys[leaf] for leaf, amax in zip(leaves, largest) if amax == math.inf}

    @property
    def learns(self) -> bool:
        """Whether the pass measures for later choices."""
        return self._share is not None

    @property
    def last_share(self) -> bool:
        """Whether everything that is measured for the next choice has been measured when the pass ends."""
        return self._share is None or self._share.last

    def run(self, loss: LossLike, seed: LossSeed) -> None:
        """Run the backward of `loss`, and put back whatever was swapped, also when something raises: nnabla
        does not stop backward when a hook does, so that arrays are put back at once, and later hooks do
        nothing.

        Args:
            loss: the loss, or what wraps it.
            seed: makes the gradient that backward starts from.
        """
        clear_buffer, (callbacks, _, _), _, grad = self._request
        error: Optional[BaseException] = None
        guard: Optional[HookGuard] = None
        pre: Optional[Hook] = None
        post: Optional[Hook] = None
        try:
            before, after = self.begin()
            if before or after:
                guard = HookGuard(self.restore)
                pre, post = guard.chain(*before), guard.chain(*after)
            run_backward(loss, self.seed, grad, clear_buffer, callbacks, pre, post, seed)
            if guard is None or guard.error is None:
                self.end()
                self.restore()
                self.finish()
                return
        except BaseException as raised:
            error = root_cause(raised)
        self.restore()
        # What is being measured is no matter of the next pass.
        self.statistics.finish()
        # What a hook raised comes first: nnabla hides it behind an error of its own.
        error = error if guard is None else guard.error or error
        assert error is not None
        raise error

    @abstractmethod
    def begin(self) -> Tuple[Hooks, Hooks]:
        """Do what is to be done before backward starts; return the hooks before and after its functions."""

    @abstractmethod
    def end(self) -> None:
        """Do what is to be done when backward has run."""

    @abstractmethod
    def restore(self) -> None:
        """Put every swapped array back; harmless when none is swapped."""

    @abstractmethod
    def finish(self) -> None:
        """End the pass, and collect the layers that were not finite."""

    def unscale_visible(self) -> None:
        """Unscale gradients that stay readable after the pass."""
        scales = self.scales
        for variable, position in self._readable():
            scale = scales.get(position, 1.0)
            if scale == 1.0:
                continue
            array = variable.grad
            if not array.clear_called and stored_dtype(array) is not None:
                self.kernels.scale_(array, 1.0 / scale)

    def _readable(self) -> Iterable[Tuple[nn.Variable, int]]:
        """The variables whose gradients stay, with their positions."""
        structure, variables = self.plan.structure, self.plan.variables
        pairs = zip(variables, structure.gradients)
        if not self._request.clear_buffer:
            return pairs
        if structure.kept_gradients:
            return [(v, p) for v, p in pairs if v.persistent or p in structure.kept_gradients]
        return compress(pairs, map(_persistent, variables))

    def rescale(self, rescales: Sequence[Rescale]) -> None:
        """Multiply gradients in place, between two functions."""
        plan = self.plan
        for position, factor in rescales:
            array = plan.all_variables[position].grad
            if stored_dtype(array) is None:
                continue
            self.kernels.scale_(array, factor)
            if self.storage is not None:
                self.storage.store_gradient(plan.keys[position], array)

    def _conclude(
        self,
        leaves: Sequence[int],
        largest: Sequence[float],
        scales: Sequence[float],
        seen: Sequence[LeafSeen] = (),
    ) -> None:
        """Take over the largest magnitude of each leaf's gradient; infinity where it is not finite.

        Args:
            leaves: positions of the leaves.
            largest: the magnitudes.
            scales: what each has carried.
            seen: which function has written what, where that is known.
        """
        self._seen = leaves, largest, scales
        if math.inf not in largest:
            return
        bad = {leaf for leaf, amax in zip(leaves, largest) if amax == math.inf}
        nodes = [node for node in self.plan.structure.nodes if not bad.isdisjoint(node.leaves)]
        self.found_inf = [node.label for node in nodes]
        if self.schedule.components is not None:
            self._note_overflow(bad, seen)

    def _note_overflow(self, bad: Set[int], seen: Sequence[LeafSeen]) -> None:
        measured, structure = self._components_of_schedule(), self.plan.structure
        told = {one.leaf for one in seen}
        written = [(one.leaf, one.function, one.largest == math.inf) for one in seen]
        for node in structure.nodes:
            written += [(leaf, node.number, leaf in bad) for leaf in node.leaves if leaf not in told]
        bad_leaves = [(leaf, function) for leaf, function, is_bad in written if is_bad]
        nonfinite = nonfinite_in(self.storage, self.plan, self.scales)
        first = measured.overflowed = first_overflow(self.plan, measured, nonfinite, bad_leaves)
        # Where the gradient of a layer is not finite, that of its weight is not; not all functions have one.
        if first is not None and self.storage is None:
            finite = {
                measured.of_leaf(structure, leaf, function)
                for leaf, function, is_bad in written
                if not is_bad
            }
            measured.suspected = unseen_before(self._components, first, finite - {first})

    def _learn(self, findings: Findings, unscaled: Iterable[LeafSeen]) -> None:
        """Take over what the share has shown of components.

        Args:
            findings: what was measured.
            unscaled: gradients of leaves that hold nothing but this batch's.
        """
        share = self._share
        if share is None or self.schedule.components is None:
            return
        measured = self._components_of_schedule()
        measured.measure_gradients(gradients_seen(self.plan, self.scales, findings.amax, self.storage))
        seen = [one for one in unscaled if one.leaf in share.leaves]
        measured.measure_leaves(self.plan.structure, seen)

    def _components_of_schedule(self) -> ComponentPass:
        if self.components is None:
            self.components = ComponentPass(self._components, self.schedule.components or ())
        return self.components
