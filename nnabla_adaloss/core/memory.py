# SPDX-License-Identifier: Apache-2.0
"""Memory of a network's components, and the measurements of this iteration.

It consists of unit amaxes: largest magnitudes, divided by the component's loss weight in their batch.
So a changed loss weight moves the scales, but not the memory. A window has an entry, the largest unit amax,
for each iteration that measures all arrays, or for as many iterations as measure them slice by slice.

All values are immutable: a pass, an overflow or another rank makes a new `Observations`. So a savepoint is a
reference, and an interrupted batch leaves no trace. Components go by name, as they outlive a rebuilt graph.
"""

from __future__ import annotations

import sys
from typing import AbstractSet, Any, Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from .choose import ScaleLimits, within_float32
from .components import Components
from .scale_history import AmaxWindow, HistoryPolicy
from .schedule import ScaleSchedule
from .validation import integer, nonnegative_number

_EMPTY = AmaxWindow()

# The amax of a lost batch is remembered for this many iterations, and for as many again after each batch that
# confirms it: the batch's own amax times this ratio reaches the remembered one. A provisional amax is 2**4
# times that whose limit is the scale that overflowed: no batch with this limit, or a higher one, confirms it.
_REMEMBERED = 2000
_CONFIRMING_RATIO = 2.0**3

# Keys of messages between ranks: of a flag; and prefixes of names of components, with their amaxes in this
# iteration, and in lost batches.
_COMPLETES_ENTRY, _AMAX, _LOST = "completes entry", "component ", "lost "

_Amaxes = Mapping[str, float]
_NONE: _Amaxes = {}


class LostAmax(NamedTuple):
    """Unit amax of a lost batch, beyond the margin that the windows leave."""

    unit_amax: float
    until: int  # the last iteration that remembers it
    largest_since: float = 0.0  # largest amax beyond this margin since `until` was set


class Memory(NamedTuple):
    """Memory of all earlier iterations, equal on all ranks."""

    policy: HistoryPolicy  # derives scales from it
    windows: Mapping[str, AmaxWindow] = {}
    partial: _Amaxes = _NONE  # of slices that have been measured for the windows' next entry
    lost: Mapping[str, LostAmax] = {}

    def after(
        self, unit_amaxes: _Amaxes, *, completes_entry: bool, lost: _Amaxes = _NONE, iteration: int
    ) -> Memory:
        """Add the amaxes of an iteration, and of its `lost` batches, which may complete an entry."""
        unit_amaxes = _larger(lost, unit_amaxes)
        memory = self._after_losses(unit_amaxes, lost, iteration)
        partial = _larger(self.partial, unit_amaxes)
        if not completes_entry:
            return memory._replace(partial=partial)
        windows = {**self.windows}
        for name, unit_amax in partial.items():
            windows[name] = windows.get(name, _EMPTY).push(unit_amax, self.policy.window)
        return memory._replace(windows=windows, partial=_NONE)

    def _after_losses(self, unit_amaxes: _Amaxes, lost: _Amaxes, iteration: int) -> Memory:
        """Remember amaxes of `lost` batches for _REMEMBERED iterations, and for as many more if one of
        `unit_amaxes` confirms them; else they fall. The windows are still those before this iteration.
        """
        remembered: Dict[str, LostAmax] = {}
        for name, (unit_amax, until, largest_since) in self.lost.items():
            measured = unit_amaxes.get(name, 0.0)
            # The windows' margin covers smaller ones.
            if self._exceeds_margin(name, measured):
                largest_since = max(largest_since, measured)
            confirmed, expired = measured * _CONFIRMING_RATIO >= unit_amax, until < iteration
            if expired and not confirmed:
                # It falls to the largest that one measured since confirms; without one it is forgotten.
                unit_amax = largest_since * _CONFIRMING_RATIO
            if expired or confirmed:
                until, largest_since = iteration + _REMEMBERED, 0.0
            if unit_amax:
                remembered[name] = LostAmax(unit_amax, until, largest_since)
        for name, unit_amax in lost.items():
            if self._exceeds_margin(name, unit_amax):
                earlier = remembered[name].unit_amax if name in remembered else 0.0
                remembered[name] = LostAmax(max(unit_amax, earlier), iteration + _REMEMBERED)
        return self._replace(lost=remembered)

    def _exceeds_margin(self, name: str, unit_amax: float) -> bool:
        """True if an amax exceeds the margin that the windows leave; False for a first measurement."""
        return unit_amax > self.policy.margin * self.windows.get(name, _EMPTY).amax > 0.0

    def state_dict(self) -> Dict[str, Any]:
        """Memory as plain lists, for saving."""
        windows = {name: window.as_list() for name, window in self.windows.items()}
        lost = {name: list(one) for name, one in self.lost.items()}
        return {"windows": windows, "partial": {**self.partial}, "lost": lost}

    def loaded(self, state: Mapping[str, Any]) -> Memory:
        """Load a `state_dict`; KeyError, TypeError, AttributeError or ValueError if it is damaged."""
        windows = {str(name): AmaxWindow.from_list(values) for name, values in state["windows"].items()}
        partial = {str(n): nonnegative_number("partial", value) for n, value in state["partial"].items()}
        # Older states have no lost batches.
        lost = {
            str(name): LostAmax(
                nonnegative_number("lost", unit_amax),
                integer("until", until),
                nonnegative_number("largest_since", largest_since),
            )
            for name, (unit_amax, until, largest_since) in state.get("lost", {}).items()
        }
        return Memory(self.policy, windows, partial, lost)


class PassMeasurements(NamedTuple):
    """Measurements of one pass; components are given by index."""

    schedule: ScaleSchedule  # schedule of the pass
    u_max: Sequence[float]  # largest magnitude that gradients of each component can have
    amax: Mapping[int, float]  # largest magnitude of each measured component, unscaled
    measured_all: bool = False  # True if every gradient was measured
    # True if each overflow shows in a gradient, as with emulated storage; none then occurs inside a function.
    shows_every_overflow: bool = False
    finite: bool = True
    has_gradients: bool = True  # True if any parameter has a nonzero gradient
    overflowed: Optional[int] = None  # the first component in backward order that was not finite
    suspected: AbstractSet[int] = frozenset()  # its predecessors that may not have been finite, either


class Observations(NamedTuple):
    """Measurements of this iteration so far, with the memory of earlier ones."""

    memory: Memory
    iteration: int = -1
    attempt: int = 0  # number of the latest pass in the iteration
    # False: the batch must run again. The pass measured a component for the first time, with a scale more
    # than a margin too low; or a descendant was zero, and may not be with the next scale.
    calibrated: bool = True
    now: _Amaxes = _NONE  # unit amaxes measured in this iteration
    # Provisional amaxes after an overflow; the next finite pass over the same batch replaces them.
    provisional: _Amaxes = _NONE
    began: FrozenSet[str] = frozenset()  # components where these overflows may have begun
    lost_now: _Amaxes = _NONE  # of batches lost in the iteration, and overflows that no measurement explains
    underflowed: FrozenSet[str] = frozenset()  # zero at the first measurement, although predecessors are not
    completes_entry: bool = False  # True if all slices have been measured for an entry of the windows
    informative: bool = False  # True if a batch had something to learn from
    measured_all: bool = False  # True if a pass has measured every gradient, of this rank's batch alone

    @property
    def policy(self) -> HistoryPolicy:
        """Derives scales from amaxes."""
        return self.memory.policy

    def unit_amaxes_of(self, names: Sequence[str]) -> List[Optional[float]]:
        """Largest known unit amax of each component, without provisional ones; None if it is unknown."""
        windows = self.memory.windows
        largest = [windows[name].amax if name in windows else None for name in names]
        lost_before = {name: one.unit_amax for name, one in self.memory.lost.items()}
        for unit_amaxes in filter(None, (lost_before, self.memory.partial, self.lost_now, self.now)):
            for index, name in enumerate(names):
                so_far = largest[index]
                if name in unit_amaxes and (so_far is None or unit_amaxes[name] > so_far):
                    largest[index] = unit_amaxes[name]
        return largest

    def limits(
        self, components: Components, loss_weights: Tuple[float, ...], u_max: Sequence[float]
    ) -> ScaleLimits:
        """Scale limits for a choice; `u_max`: the end of the range of each component's gradients."""
        unit_amaxes = self.unit_amaxes_of(components.names)
        limits: List[Optional[float]] = [None] * len(loss_weights)
        provisional_limits: Dict[int, float] = {}
        for index, (name, weight) in enumerate(zip(components.names, loss_weights)):
            unit_amax, provisional = unit_amaxes[index], self.provisional.get(name, 0.0)
            if weight and unit_amax:
                # A provisional amax counts like a measured one.
                limits[index] = _limit(self.policy, max(unit_amax, provisional), weight, u_max[index])
            if weight and provisional:
                # It also limits where measurements do not: unmeasured components, and a given S0.
                provisional_limits[index] = _limit(self.policy, provisional, weight, u_max[index])
        return ScaleLimits(
            limits=limits,
            provisional=provisional_limits,
            loss_weights=loss_weights,
            unit_amaxes=unit_amaxes,
            underflowed={i for i, name in enumerate(components.names) if name in self.underflowed},
            # After an overflow the sizes of gradients are unknown: each scale goes as low as it has to.
            equalize=not self.provisional,
        )

    def before_pass(self, iteration: int) -> Observations:
        """Begin another pass; in a new iteration, end the last one first."""
        if self.iteration == iteration:
            return self._replace(attempt=self.attempt + 1, calibrated=True)
        return Observations(self.remembered(), iteration)

    def after_pass(
        self,
        measured: PassMeasurements,
        *,
        completes_entry: bool,
        informative: bool = True,
        rerun: bool = False,
    ) -> Observations:
        """Add the measurements of a pass. `completes_entry`: all slices have been measured; `informative`:
        there is something to learn; `rerun`: the batch must run again, as after some first measurements.
        """
        components, loss_weights = measured.schedule.components, measured.schedule.loss_weights
        names, amax, complete = components.names, measured.amax, measured.measured_all and measured.finite
        if complete:
            # A component of which no array was written has a gradient of zero.
            amax = {**dict.fromkeys(components.computed, 0.0), **amax}
        unit_amaxes = {names[i]: largest / loss_weights[i] for i, largest in amax.items() if loss_weights[i]}
        after = self
        if complete and self.provisional:
            after = self._after_finite_pass(unit_amaxes, measured.shows_every_overflow)
        after = after._replace(
            now=_larger(self.now, unit_amaxes),
            completes_entry=self.completes_entry or completes_entry,
            informative=self.informative or informative,
            measured_all=self.measured_all or measured.measured_all,
            calibrated=self.calibrated and not rerun,
        )
        return after._after_first_measurement(self.unit_amaxes_of(names), measured)

    def _after_finite_pass(self, unit_amaxes: _Amaxes, shows_every_overflow: bool) -> Observations:
        """Drop provisional amaxes after a finite pass over the same batch, which measured every gradient. If
        these do not explain the overflow, keep the provisional ones where it may have begun as lost.
        """
        suspects = {name: self.provisional[name] for name in self.began if name in self.provisional}
        # If no measured amax comes near its provisional one, the overflow was inside a function, which no
        # measurement shows, and would occur again at the measured scales.
        explained = shows_every_overflow or any(
            unit_amaxes.get(name, 0.0) * _CONFIRMING_RATIO >= unit_amax
            for name, unit_amax in suspects.items()
        )
        lost = self.lost_now if explained else _larger(self.lost_now, suspects)
        return self._replace(provisional=_NONE, began=frozenset(), lost_now=lost)

    def _after_first_measurement(
        self, unit_amaxes_before: Sequence[Optional[float]], measured: PassMeasurements
    ) -> Observations:
        """Decide if the pass just added requires a rerun, for components that were unmeasured or zero until
        then; `unit_amaxes_before`: of all components, before the pass.
        """
        schedule, loss_weights, policy = measured.schedule, measured.schedule.loss_weights, self.policy
        components, names = schedule.components, schedule.components.names
        # A slice in which all is zero says nothing new about a component that was zero before.
        without_amax = (None, 0.0) if measured.measured_all or measured.has_gradients else (None,)
        new = {i for i in components.computed if loss_weights[i] and unit_amaxes_before[i] in without_amax}
        if not new:
            return self
        unit_amaxes = self.unit_amaxes_of(names)
        nonzero = {index for index in new if unit_amaxes[index]}
        scales_too_low = any(
            _limit(policy, self.now[names[i]], loss_weights[i], measured.u_max[i])
            > schedule.component_scales[i] * policy.margin
            for i in nonzero
        )
        zero = new - nonzero
        if not (measured.measured_all and measured.finite and zero):
            return self._replace(calibrated=self.calibrated and not scales_too_low)
        # With their next scales, nonzero ones may bring gradients to descendants that are zero now.
        may_change = not components.with_descendants(nonzero).isdisjoint(zero)
        # The loss gradient is not zero. Zeros after nonzero ones have underflowed; a layer's weight may be 0.
        sources = {components.root, *(i for i, unit_amax in enumerate(unit_amaxes_before) if unit_amax)}
        followers = {e.successor for e in components.edges if e.layer is None and e.predecessor in sources}
        # Each is tried once with a higher scale: not again in later iterations, whose windows have the zero.
        underflowed = {names[i] for i in zero & (followers | {components.root})} - self.memory.windows.keys()
        rerun = scales_too_low or may_change or not underflowed <= self.underflowed
        return self._replace(
            underflowed=self.underflowed | underflowed, calibrated=self.calibrated and not rerun
        )

    def after_overflow(self, measured: PassMeasurements) -> Tuple[Observations, bool]:
        """Lower the scales of the components where a pass overflowed, and of their descendants, for the next
        try; False: none overflowed, or the first one's scale is at the minimum.
        """
        first, schedule, policy = measured.overflowed, measured.schedule, self.policy
        if first is None:
            return self, False
        components, provisional = schedule.components, {**self.provisional}
        unit_amaxes = self.unit_amaxes_of(components.names)
        began = {first, *measured.suspected}
        # Descendants have usually grown, too, and would overflow in turn.
        for index in components.with_descendants(began):
            name, weight, u_max = components.names[index], schedule.loss_weights[index], measured.u_max[index]
            scale, unit_amax = schedule.component_scales[index], unit_amaxes[index]
            # The scale of an unmeasured descendant follows from its predecessor, which is lowered already.
            follows = index not in began and not unit_amax and name not in provisional
            if follows or not weight:
                continue
            if unit_amax and index != first:
                scale = min(_limit(policy, unit_amax, weight, u_max), scale)
            # The amax whose limit is the scale of the next try: the inverse of `_limit`.
            small, large = _parts(weight)
            provisional[name] = policy.amax_of(policy.after_overflow(scale * large), u_max=u_max) / small
        weight, scale = schedule.loss_weights[first], schedule.component_scales[first]
        lowered = weight > 0.0 and not policy.at_floor(scale * _parts(weight)[1])
        names = self.began.union(components.names[index] for index in began)
        return self._replace(provisional=provisional, began=names), lowered

    def after_lost_batch(self) -> Observations:
        """Keep the provisional amaxes of an overflow: no pass over this batch will measure them."""
        lost = _larger(_larger(self.lost_now, self.now), self.provisional)
        return self._replace(provisional=_NONE, began=frozenset(), lost_now=lost)

    @property
    def _learned(self) -> _Amaxes:
        """Amaxes of this iteration; zeros for new components if it is not informative."""
        if self.informative:
            return self.now
        return {name: 0.0 for name in self.now if name not in self.memory.windows}

    def shared(self) -> Dict[str, Sequence[float]]:
        """Export the amaxes for other ranks, and whether they complete an entry of the windows."""
        lost = _larger(self.lost_now, self.provisional)
        return {
            _COMPLETES_ENTRY: [float(self.completes_entry)],
            **{_AMAX + name: [unit_amax] for name, unit_amax in self._learned.items()},
            **{_LOST + name: [unit_amax] for name, unit_amax in lost.items()},
        }

    def adopting(self, messages: Sequence[Mapping[str, Sequence[float]]]) -> Observations:
        """Replace this rank's amaxes by the largest `shared` ones of all ranks."""
        after = self._replace(provisional=_NONE, began=frozenset(), informative=True)
        return after._replace(
            completes_entry=any(message[_COMPLETES_ENTRY][0] for message in messages),
            now=_largest(_AMAX, messages),
            lost_now=_largest(_LOST, messages),
        )

    @property
    def lost_recently(self) -> bool:
        """True if scales of some component are still low because of an earlier lost batch."""
        return bool(self.memory.lost or self.lost_now)

    def remembered(self, *, good: bool = False) -> Memory:
        """Memory with the amaxes of this iteration, and the provisional ones unless it ended `good`."""
        last = self.after_lost_batch() if self.provisional and not good else self
        if not (last.now or last.lost_now or last.completes_entry):
            return self.memory
        return self.memory.after(
            last._learned, completes_entry=self.completes_entry, lost=last.lost_now, iteration=self.iteration
        )

    def after_iteration(self, *, good: bool = False) -> Observations:
        """End the iteration; unless it ended `good`, provisional amaxes are kept as those of a lost batch."""
        return self._replace(memory=self.remembered(good=good)).without_iteration()

    def without_iteration(self) -> Observations:
        """Drop the measurements of this iteration."""
        return Observations(self.memory, self.iteration, self.attempt, self.calibrated)

    def without_batch(self) -> Observations:
        """Drop the measurements of this iteration, except of batches lost before."""
        return self.without_iteration()._replace(lost_now=self.lost_now)

    def state_dict(self) -> Dict[str, Any]:
        """Memory as plain lists; the iteration ends."""
        return self.remembered().state_dict()

    def unit_amaxes(self) -> Dict[str, float]:
        """Largest unit amax in the window of each component, by name."""
        return {name: window.amax for name, window in self.memory.windows.items()}


def _limit(policy: HistoryPolicy, unit_amax: float, weight: float, u_max: float) -> float:
    """Scale limit of gradients of at most `unit_amax * weight`, stored in a format that ends at `u_max`."""
    small, large = _parts(weight)
    amax = max(unit_amax * small, sys.float_info.min)  # the product may have underflowed to 0
    # Divided after the policy has clamped it to `min_scale`, the scale of a large loss weight may be lower.
    return within_float32(policy.scale(amax, u_max=u_max) / large)


def _parts(weight: float) -> Tuple[float, float]:
    """Split a loss weight into a factor of at most 1, and one of at least 1, which lowers `min_scale`."""
    # The first one does not raise it: a factor that cannot be read, such as a logarithm's, may cancel it.
    return min(weight, 1.0), max(weight, 1.0)


def _larger(one: _Amaxes, other: _Amaxes) -> _Amaxes:
    """Larger of the two values of each name."""
    if not (one and other):
        return one or other
    return {**one, **{n: value for n, value in other.items() if n not in one or value > one[n]}}


def _largest(prefix: str, messages: Sequence[Mapping[str, Sequence[float]]]) -> _Amaxes:
    """Largest amax by name, under keys with this prefix, as if the batches of all ranks were one."""
    largest = _NONE
    for message in messages:
        amaxes = {key[len(prefix) :]: row[0] for key, row in message.items() if key.startswith(prefix)}
        largest = _larger(largest, amaxes)
    return largest
