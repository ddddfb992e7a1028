# SPDX-License-Identifier: Apache-2.0
"""Memory of a network's components, and the measurements of this iteration.

Both store unit amaxes: largest magnitudes, divided by the component's loss weight in their batch. So a
changed loss weight moves the scales, but not the memory. A window gets an entry, the largest unit amax, each
time all arrays have been measured: in one iteration, or slice by slice in several.

All values are immutable: a pass, an overflow or another rank makes a new `Observations`. So a savepoint is a
reference, and an interrupted batch leaves no trace. Components go by name, as they outlive a rebuilt graph.
"""

from __future__ import annotations

import sys
from typing import AbstractSet, Any, Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from .choose import ScaleLimits
from .components import Components
from .power_of_two import within_float32
from .scale_history import AmaxWindow, HistoryPolicy
from .schedule import ScaleSchedule
from .validation import integer, nonnegative_number

_EMPTY = AmaxWindow()
_REMEMBERED = 2000  # number of iterations that remember a lost batch, after it or a batch that confirms it
# A batch confirms a lost amax that is at most this many times its own. After an overflow at scale s the lost
# amax is, by default, that with the limit s / 16: batches that fit at s have at most a 16th, and do not.
_CONFIRMING_RATIO = 2.0**3

# Keys of messages between ranks: a flag, and a prefix with the name of a component for its amax.
_COMPLETES_ENTRY = "completes entry"
_AMAX, _LOST = "component ", "lost "  # prefixes for amaxes of this iteration, and of its lost batches

_Amaxes = Mapping[str, float]
_NONE: _Amaxes = {}


class LostAmax(NamedTuple):
    """Unit amax of a lost batch, more than a margin above those in the window."""

    unit_amax: float
    until: int  # the last iteration that remembers it
    largest_since: float = 0.0  # largest amax above that margin which was measured since `until` was set


class Memory(NamedTuple):
    """Memory of all earlier iterations, equal on all ranks."""

    policy: HistoryPolicy  # derives scales from it
    windows: Mapping[str, AmaxWindow] = {}
    partial: _Amaxes = _NONE  # amaxes of the slices measured so far for the windows' next entry
    lost: Mapping[str, LostAmax] = {}

    def after(self, unit_amaxes: _Amaxes, *, completes_entry: bool, lost: _Amaxes, iteration: int) -> Memory:
        """Add the amaxes of an iteration, and those of its `lost` batches; flag: see `Observations`."""
        unit_amaxes = _larger(lost, unit_amaxes)  # windows get lost amaxes, too, but drop them sooner
        partial = _larger(self.partial, unit_amaxes)
        remembered = self._lost_after(unit_amaxes, lost, iteration)
        if not completes_entry:
            return self._replace(partial=partial, lost=remembered)
        windows = {**self.windows}
        for name, unit_amax in partial.items():
            windows[name] = windows.get(name, _EMPTY).push(unit_amax, self.policy.window)
        return Memory(self.policy, windows, _NONE, remembered)

    def _lost_after(self, unit_amaxes: _Amaxes, new: _Amaxes, iteration: int) -> Dict[str, LostAmax]:
        """Keep, lower or drop earlier amaxes of lost batches after an iteration; add `new` ones."""
        until = iteration + _REMEMBERED
        remembered: Dict[str, LostAmax] = {}
        for name, one in self.lost.items():
            measured = unit_amaxes.get(name, 0.0)
            if self._exceeds_margin(name, measured):
                one = one._replace(largest_since=max(one.largest_since, measured))
            if measured * _CONFIRMING_RATIO >= one.unit_amax:
                # A batch nearly as large has come again: remember the amax as long once more.
                one = LostAmax(one.unit_amax, until)
            elif one.until < iteration:
                # None came: the amax is lowered to the largest that a batch since then confirms.
                one = LostAmax(one.largest_since * _CONFIRMING_RATIO, until)
            if one.unit_amax:  # 0: no batch since then confirms any, and it is forgotten
                remembered[name] = one
        for name, unit_amax in new.items():
            if self._exceeds_margin(name, unit_amax):
                earlier = remembered[name].unit_amax if name in remembered else 0.0
                remembered[name] = LostAmax(max(unit_amax, earlier), until)
        return remembered

    def _exceeds_margin(self, name: str, unit_amax: float) -> bool:
        """True if an amax is more than a margin above those in the window; False if it is empty."""
        largest = self.windows.get(name, _EMPTY).amax
        return 0.0 < self.policy.margin * largest < unit_amax

    def state_dict(self) -> Dict[str, Any]:
        """Memory as plain lists, for saving."""
        windows = {name: window.as_list() for name, window in self.windows.items()}
        lost = {name: list(one) for name, one in self.lost.items()}
        return {"windows": windows, "partial": {**self.partial}, "lost": lost}

    def with_state(self, state: Mapping[str, Any]) -> Memory:
        """Load a `state_dict`; KeyError, TypeError, AttributeError or ValueError if it is damaged."""
        windows = {str(name): AmaxWindow.from_list(values) for name, values in state["windows"].items()}
        partial = {str(n): nonnegative_number("partial", value) for n, value in state["partial"].items()}
        # States of versions that did not remember lost batches lack "lost".
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
    u_max: Sequence[float]  # end of the range in which each component's gradients are stored
    amax: Mapping[int, float]  # largest magnitude of each measured component, unscaled
    measured_all: bool = False  # True if every gradient was measured
    # True if each overflow shows in a gradient, as with emulated storage. On a GPU it may be that of a sum
    # inside a function, although no gradient is large.
    shows_every_overflow: bool = False
    finite: bool = True
    has_gradients: bool = True  # True if any parameter has a nonzero gradient
    overflowed: Optional[int] = None  # the first component in backward order with a nonfinite gradient
    suspected: AbstractSet[int] = frozenset()  # its predecessors without a gradient known to be finite

    @property
    def is_complete(self) -> bool:
        """True if every gradient was measured, and is finite."""
        return self.measured_all and self.finite


class Observations(NamedTuple):
    """Measurements of this iteration so far, with the memory of earlier ones."""

    memory: Memory
    iteration: int = -1
    attempt: int = 0  # number of the latest pass in the iteration
    # False if the batch must run again: a component's first measurement shows that its scale was more than a
    # margin too low, or components are zero that may not be zero with the next scales.
    calibrated: bool = True
    now: _Amaxes = _NONE  # unit amaxes measured in this iteration
    # Provisional amaxes after an overflow; the next finite pass over the same batch replaces them.
    provisional: _Amaxes = _NONE
    origins: FrozenSet[str] = frozenset()  # components of these amaxes in which an overflow may have begun
    # Amaxes of batches lost in this iteration, and provisional ones of overflows inside functions.
    lost_now: _Amaxes = _NONE
    underflowed: FrozenSet[str] = frozenset()  # zero at the first measurement, although predecessors are not
    completes_entry: bool = False  # True if all slices have been measured for an entry of the windows
    informative: bool = False  # True if the loss of a batch was not zero, so that amaxes are remembered
    measured_all: bool = False  # True if a pass has measured every gradient, of this rank's batch alone

    @property
    def policy(self) -> HistoryPolicy:
        """Derives scales from amaxes."""
        return self.memory.policy

    def unit_amaxes_of(self, names: Sequence[str]) -> List[Optional[float]]:
        """Largest known unit amax of each component, for its limit; None if it is unknown."""
        largest: _Amaxes = self.unit_amaxes()  # those in the windows
        lost_before = {name: one.unit_amax for name, one in self.memory.lost.items()}
        for unit_amaxes in (lost_before, self.memory.partial, self.lost_now, self.now):
            largest = _larger(largest, unit_amaxes)
        return [*map(largest.get, names)]

    def limits(
        self, components: Components, loss_weights: Tuple[float, ...], u_max: Sequence[float]
    ) -> ScaleLimits:
        """Limit scales by known amaxes; `u_max`: the end of the range of each component's gradients."""
        unit_amaxes = self.unit_amaxes_of(components.names)
        limits: List[Optional[float]] = [None] * len(loss_weights)
        provisional_limits: Dict[int, float] = {}
        for index, (name, weight) in enumerate(zip(components.names, loss_weights)):
            unit_amax, provisional = unit_amaxes[index], self.provisional.get(name, 0.0)
            if weight and unit_amax:  # active, measured, and not all zero
                limits[index] = self._limit(max(unit_amax, provisional), weight, u_max[index])
            if weight and provisional:
                # Unlike `limits`, these also lower unmeasured components, and a given S0.
                provisional_limits[index] = self._limit(provisional, weight, u_max[index])
        return ScaleLimits(
            limits=limits,
            provisional=provisional_limits,
            loss_weights=loss_weights,
            unit_amaxes=unit_amaxes,
            underflowed={i for i, name in enumerate(components.names) if name in self.underflowed},
            # A provisional limit is a guess: equalized neighbours would be lowered to it, too.
            equalize=not self.provisional,
        )

    def before_pass(self, iteration: int) -> Observations:
        """Begin another pass; in a new iteration, end the last one first."""
        if self.iteration == iteration:
            return self._replace(attempt=self.attempt + 1, calibrated=True)
        return Observations(self.next_memory(), iteration)

    def after_pass(
        self,
        measured: PassMeasurements,
        *,
        completes_entry: bool,
        informative: bool = True,
        rerun: bool = False,
    ) -> Observations:
        """Add the measurements of a pass; `rerun`: the batch runs again anyway, as with `delay=0`."""
        components, loss_weights = measured.schedule.components, measured.schedule.loss_weights
        names, amax = components.names, measured.amax
        if measured.is_complete:
            # An unwritten gradient is zero. As unmeasured, it would make every pass measure all of them.
            amax = {**dict.fromkeys(components.computed, 0.0), **amax}
        unit_amaxes = {names[i]: largest / loss_weights[i] for i, largest in amax.items() if loss_weights[i]}
        after = self
        if self.provisional and measured.is_complete:
            after = self._after_finite_pass(unit_amaxes, measured.shows_every_overflow)
        after = after._replace(
            now=_larger(self.now, unit_amaxes),
            completes_entry=self.completes_entry or completes_entry,
            informative=self.informative or informative,
            measured_all=self.measured_all or measured.measured_all,
            calibrated=self.calibrated and not rerun,
        )
        return after._after_first_measurement(self, measured)

    def _after_finite_pass(self, unit_amaxes: _Amaxes, shows_every_overflow: bool) -> Observations:
        """Drop provisional amaxes after a finite pass that measured every gradient; keep some as lost."""
        # If no gradient was large enough to overflow, a sum inside a function overflowed. At scales for the
        # gradients alone it would do so again: keep the amaxes of components where it may have begun.
        kept = {name: self.provisional[name] for name in self.origins if name in self.provisional}
        a_gradient_overflowed = shows_every_overflow or any(
            unit_amaxes.get(name, 0.0) * _CONFIRMING_RATIO >= unit_amax for name, unit_amax in kept.items()
        )
        return self._with_lost(self.lost_now if a_gradient_overflowed else _larger(self.lost_now, kept))

    def _after_first_measurement(self, before: Observations, measured: PassMeasurements) -> Observations:
        """Find underflow in components that were unmeasured or zero `before`; decide if they need a rerun."""
        components, loss_weights = measured.schedule.components, measured.schedule.loss_weights
        names, unit_amaxes_before = components.names, before.unit_amaxes_of(components.names)
        # A zero says as little as no measurement: it may have underflowed. But if no parameter has a
        # gradient, only a pass that measures all can tell an underflow from a loss of 0.
        unknown = (None, 0.0) if measured.measured_all or measured.has_gradients else (None,)
        new = {i for i in components.computed if loss_weights[i] and unit_amaxes_before[i] in unknown}
        if not new:
            return self
        nonzero = {index for index in new if self.now.get(names[index])}
        # Zeros prove nothing unless every gradient was measured, and is finite.
        zero = new - nonzero if measured.is_complete else frozenset()
        # A zero directly after a nonzero gradient has underflowed, and so has a loss gradient of zero: loss
        # weights are not 0 here. After a layer a zero may be right: the layer's weight may be 0.
        never_zero = {components.root}
        for edge in components.edges if zero else ():
            is_source = edge.predecessor == components.root or unit_amaxes_before[edge.predecessor]
            if edge.layer is None and is_source:
                never_zero.add(edge.successor)
        # Each is tried at a higher scale in one iteration; in later ones its window has the zero.
        underflowed = {names[i] for i in zero & never_zero} - self.memory.windows.keys()
        scales = measured.schedule.component_scales
        limits = {i: self._limit(self.now[names[i]], loss_weights[i], measured.u_max[i]) for i in nonzero}
        rerun = (
            # At a scale more than a margin below its limit, small elements may have underflowed.
            any(limit > scales[i] * self.policy.margin for i, limit in limits.items())
            # At their next scales, nonzero components may bring gradients to descendants that are zero now.
            or not components.with_descendants(nonzero).isdisjoint(zero)
            or not underflowed <= self.underflowed
        )
        calibrated = self.calibrated and not rerun
        return self._replace(underflowed=self.underflowed | underflowed, calibrated=calibrated)

    def _limit(self, unit_amax: float, weight: float, u_max: float) -> float:
        """Scale limit of gradients up to `unit_amax * weight`, stored in a format that ends at `u_max`."""
        # A weight above 1 divides the scale after the policy has clamped it to `min_scale`: gradients that it
        # enlarges may need less. One below 1 must not: `log(loss * 2**-46)` has gradients near 1, and their
        # lowest scale would be 2**-24 / 2**-46.
        amax = max(unit_amax * min(weight, 1.0), sys.float_info.min)  # the product may have underflowed to 0
        return within_float32(self.policy.scale(amax, u_max=u_max) / max(weight, 1.0))

    def after_overflow(self, measured: PassMeasurements) -> Tuple[Observations, bool]:
        """Lower the scales where a pass overflowed, and those of descendants, for the next try. The flag is
        False if this cannot help: no component overflowed, or the first is inactive or at the minimum.
        """
        first, schedule, policy = measured.overflowed, measured.schedule, self.policy
        if first is None:
            return self, False
        names, scales, weights = schedule.components.names, schedule.component_scales, schedule.loss_weights
        unit_amaxes, provisional = self.unit_amaxes_of(names), {**self.provisional}
        origins = {first, *measured.suspected}
        # Descendants have usually grown, too: one after the other would overflow in the next tries.
        for index in schedule.components.with_descendants(origins):
            unit_amax, scale, u_max = unit_amaxes[index], scales[index], measured.u_max[index]
            # An unmeasured descendant needs no limit: its scale follows from its predecessor's lowered one.
            follows = index not in origins and not unit_amax and names[index] not in provisional
            if follows or not weights[index]:
                continue
            if unit_amax and index != first:
                # Amaxes of this pass may have lowered the limit. The first one overflowed at `scale` itself.
                scale = min(self._limit(unit_amax, weights[index], u_max), scale)
            # The inverse of `_limit` above: the unit amax whose limit is the scale of the next try.
            next_scale = policy.after_overflow(scale * max(weights[index], 1.0))  # at loss weights up to 1
            provisional[names[index]] = policy.amax_of(next_scale, u_max=u_max) / min(weights[index], 1.0)
        can_lower = weights[first] > 0.0 and not policy.at_floor(scales[first] * max(weights[first], 1.0))
        origin_names = self.origins.union(names[index] for index in origins)
        return self._replace(provisional=provisional, origins=origin_names), can_lower

    def after_lost_batch(self) -> Observations:
        """Keep the provisional amaxes of an overflow: no pass over this batch will measure them."""
        return self._with_lost(_larger(_larger(self.lost_now, self.now), self.provisional))

    def _with_lost(self, lost: _Amaxes) -> Observations:
        """Replace the amaxes of lost batches, and drop provisional ones."""
        return self._replace(lost_now=lost, provisional=_NONE, origins=frozenset())

    @property
    def _to_remember(self) -> _Amaxes:
        """Amaxes to remember of this iteration: all if it is `informative`, else zeros of new components."""
        if self.informative:
            return self.now
        # Without an entry they would stay unmeasured, and each pass would measure every gradient.
        return {name: 0.0 for name in self.now if name not in self.memory.windows}

    def message(self) -> Dict[str, Sequence[float]]:
        """Message for `after_exchange` on all ranks: by key, a row of numbers, which is only one here."""
        # It is sent with the gradients: if a rank's are not finite, all ranks then lose their batches, and no
        # pass will replace provisional amaxes.
        lost = _larger(self.lost_now, self.provisional)
        return {
            _COMPLETES_ENTRY: [float(self.completes_entry)],
            **{_AMAX + name: [unit_amax] for name, unit_amax in self._to_remember.items()},
            **{_LOST + name: [unit_amax] for name, unit_amax in lost.items()},
        }

    def after_exchange(self, messages: Sequence[Mapping[str, Sequence[float]]]) -> Observations:
        """Replace this rank's amaxes by the largest in the `message`s of all ranks, its own included."""
        after = self._with_lost(_largest(_LOST, messages))
        return after._replace(
            # Windows stay equal on all ranks: a rank that has measured everything completes the entry of all.
            completes_entry=any(message[_COMPLETES_ENTRY][0] for message in messages),
            now=_largest(_AMAX, messages),
            informative=True,  # each rank has shared only amaxes to remember
        )

    @property
    def lost_recently(self) -> bool:
        """True if scales of some component are still low because of an earlier lost batch."""
        return bool(self.memory.lost or self.lost_now)

    def next_memory(self, *, good: bool = False) -> Memory:
        """Memory with the amaxes of this iteration, and the provisional ones unless it ends `good`."""
        last = self.after_lost_batch() if self.provisional and not good else self
        if not (last.now or last.lost_now or last.completes_entry):
            return self.memory
        amaxes, completes_entry = last._to_remember, last.completes_entry
        return last.memory.after(
            amaxes, completes_entry=completes_entry, lost=last.lost_now, iteration=last.iteration
        )

    def after_iteration(self, *, good: bool = False) -> Observations:
        """End the iteration, and remember its amaxes; `good`: True if it ends with an update."""
        return self._replace(memory=self.next_memory(good=good)).without_iteration()

    def without_iteration(self) -> Observations:
        """Drop the measurements of this iteration."""
        return Observations(self.memory, self.iteration, self.attempt, self.calibrated)

    def without_batch(self) -> Observations:
        """Drop the measurements of this iteration, except of batches lost before."""
        return self.without_iteration()._replace(lost_now=self.lost_now)

    def unit_amaxes(self) -> Dict[str, float]:
        """Largest unit amax in the window of each component, by name."""
        return {name: window.amax for name, window in self.memory.windows.items()}


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
