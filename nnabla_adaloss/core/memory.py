# SPDX-License-Identifier: Apache-2.0
"""Memory of a network's components, and the measurements of this iteration.

It consists of gains (unit amaxes): largest magnitudes, divided by the component's loss weight in their batch.
So a changed loss weight moves the scales, but not the memory.

All values are immutable: a pass, an overflow or another rank makes a new `Seen`. So a savepoint is a
reference, and an interrupted batch leaves no trace. Components are given by name, as they outlive a rebuilt
graph.
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

# Iterations that remember the gains of a lost batch, and as many more when a batch shows one within
# `_CONFIRMS`: a loss assumes 2**4 more than its scales had room for, which ordinary batches must not confirm.
_REMEMBERED = 2000
_CONFIRMS = 2.0**3

_Gains = Mapping[str, float]
_NONE: _Gains = {}


class LostGain(NamedTuple):
    """Gain that has lost a batch, beyond the margin above the windows."""

    gain: float
    until: int  # the last iteration that remembers it
    shown: float = 0.0  # the largest gain since then that lies beyond the windows' margin, too


class Memory(NamedTuple):
    """Memory of all earlier iterations, equal on all ranks."""

    policy: HistoryPolicy  # derives scales from it
    windows: Mapping[str, AmaxWindow] = {}
    partial: _Gains = _NONE  # since the last entry of the windows, if an entry takes several iterations
    lost: Mapping[str, LostGain] = {}

    def after(self, gains: _Gains, *, completes_entry: bool, lost: _Gains = _NONE, iteration: int) -> Memory:
        """Add the gains of another iteration, and of the batches that it has `lost`."""
        gains = _larger(lost, gains)
        memory = self._after_losses(gains, lost, iteration) if self.lost or lost else self
        partial = _larger(self.partial, gains)
        if not completes_entry:
            return memory._replace(partial=partial)
        windows, length = self.windows, self.policy.window
        pushed = {name: windows.get(name, _EMPTY).push(gain, length) for name, gain in partial.items()}
        return memory._replace(windows={**windows, **pushed}, partial=_NONE)

    def _after_losses(self, gains: _Gains, lost: _Gains, iteration: int) -> Memory:
        """Add losses; `gains` near earlier ones prolong these."""
        # A loss that no gain comes near expires: its gain falls to the largest shown since, or is forgotten.
        kept: Dict[str, LostGain] = {}
        for name, (gain, until, shown) in self.lost.items():
            now = gains.get(name, 0.0)
            if now > shown and self._is_beyond(name, now):
                shown = now
            if now * _CONFIRMS >= gain:
                until, shown = iteration + _REMEMBERED, 0.0
            elif until < iteration:
                gain, until, shown = shown * _CONFIRMS, iteration + _REMEMBERED, 0.0
            if gain:
                kept[name] = LostGain(gain, until, shown)
        for name, gain in lost.items():
            if self._is_beyond(name, gain):
                before = kept[name].gain if name in kept else 0.0
                kept[name] = LostGain(max(gain, before), iteration + _REMEMBERED)
        return self._replace(lost=kept)

    def _is_beyond(self, name: str, gain: float) -> bool:
        """True if a gain exceeds the room that the windows leave; False for a first measurement."""
        return gain > self.policy.margin * self.windows.get(name, _EMPTY).amax > 0.0

    def state_dict(self) -> Dict[str, Any]:
        """Memory as plain lists, for saving."""
        windows = {name: window.as_list() for name, window in self.windows.items()}
        lost = {name: list(one) for name, one in self.lost.items()}
        return {"windows": windows, "partial": {**self.partial}, "lost": lost}

    def loaded(self, state: Mapping[str, Any]) -> Memory:
        """Load a `state_dict`, with this policy; KeyError, TypeError, AttributeError or ValueError."""
        windows = {str(name): AmaxWindow.from_list(values) for name, values in state["windows"].items()}
        partial = {str(n): nonnegative_number("partial", value) for n, value in state["partial"].items()}
        # Older states have no lost batches.
        lost = {
            str(name): LostGain(
                nonnegative_number("lost", gain), integer("until", until), nonnegative_number("shown", shown)
            )
            for name, (gain, until, shown) in state.get("lost", {}).items()
        }
        return Memory(self.policy, windows, partial, lost)


class PassMeasurements(NamedTuple):
    """Measurements of one pass; components are given by index."""

    schedule: ScaleSchedule  # schedule of the pass
    u_max: Sequence[float]  # largest magnitude that gradients of each component can have
    amax: Mapping[int, float]  # largest magnitude of each measured component, unscaled
    measured_all: bool = False  # True if every gradient was measured
    shows_overflows: bool = False  # True if each overflow shows in a gradient, as with emulated storage
    finite: bool = True
    has_gradients: bool = True  # True if any parameter has a nonzero gradient
    overflowed: Optional[int] = None  # the first component in backward order that was not finite
    suspected: AbstractSet[int] = frozenset()  # its predecessors that may not have been finite, either


class Seen(NamedTuple):
    """Measurements of this iteration so far, with the memory of earlier ones."""

    memory: Memory
    iteration: int = -1
    attempt: int = 0  # number of the latest pass in it
    last_pass: Tuple[Sequence[str], Sequence[float]] = ((), ())  # its components, and their loss weights
    # False: the batch must run again. The pass measured a component for the first time, with a scale more
    # than a margin too low; or a descendant was zero, and may not be with the next scale.
    settled: bool = True
    now: _Gains = _NONE
    # Provisional gains after an overflow; the next finite pass over the same batch replaces them.
    assumed: _Gains = _NONE
    began: FrozenSet[str] = frozenset()  # components where these overflows may have begun
    lost: _Gains = _NONE  # of lost batches, and those that no measurement explains
    underflowed: FrozenSet[str] = frozenset()  # zero at the first measurement, although predecessors are not
    entry_complete: bool = False  # True if an entry of the windows is completely measured
    informative: bool = False  # True if a batch had a nonzero loss
    not_exchanged: bool = False  # True if single batches were measured without other ranks

    @property
    def policy(self) -> HistoryPolicy:
        """Derives scales from gains."""
        return self.memory.policy

    def gain(self, name: str) -> Optional[float]:
        """Largest gain of a component; None if unmeasured."""
        return self.gains_of([name])[0]

    def gains_of(self, names: Sequence[str]) -> List[Optional[float]]:
        """Compute `gain` of many components."""
        windows, lost = self.memory.windows, self.memory.lost
        found = [windows[name].amax if name in windows else None for name in names]
        since = {name: one.gain for name, one in lost.items()}, self.memory.partial, self.lost, self.now
        for gains in filter(None, since):
            for index, name in enumerate(names):
                known = found[index]
                if name in gains and (known is None or gains[name] > known):
                    found[index] = gains[name]
        return found

    def limits(
        self, components: Components, weights: Tuple[float, ...], u_max: Sequence[float]
    ) -> ScaleLimits:
        """Scale limits for a choice; `u_max` has the largest magnitude of each component."""
        gains = self.gains_of(components.names)
        limits: List[Optional[float]] = []
        provisional: Dict[int, float] = {}
        for index, (name, gain, weight, largest) in enumerate(zip(components.names, gains, weights, u_max)):
            assumed = self.assumed.get(name, 0.0)
            if weight and assumed:
                provisional[index] = _scale(self.policy, assumed, weight, largest)
            measured = bool(gain and weight)
            limits.append(
                _scale(self.policy, max(gain or 0.0, assumed), weight, largest) if measured else None
            )
        return ScaleLimits(
            limits=limits,
            provisional=provisional,
            loss_weights=weights,
            gains=gains,
            underflowed={i for i, name in enumerate(components.names) if name in self.underflowed},
            # After an overflow the sizes of gradients are unknown: each scale goes as low as it has to.
            equalize=not self.assumed,
        )

    def before_pass(self, iteration: int, names: Sequence[str], weights: Sequence[float]) -> Seen:
        """Begin another pass, with these loss weights; after the last iteration, if this is a new one."""
        if self.iteration == iteration:
            return self._replace(attempt=self.attempt + 1, last_pass=(names, weights), settled=True)
        return Seen(self.remembered(), iteration, 0, (names, weights))

    def after_pass(
        self,
        measured: PassMeasurements,
        *,
        completes_entry: bool,
        informative: bool = True,
        again: bool = False,
    ) -> Seen:
        """Add the measurements of a pass; `informative`: its loss is not zero; `again`: a repeat."""
        components, weights = measured.schedule.components, measured.schedule.loss_weights
        names, amax, everything = components.names, measured.amax, measured.measured_all and measured.finite
        if everything:
            # A component without a written array has a gradient of zero.
            amax = {**dict.fromkeys(components.computed, 0.0), **amax}
        gains = {names[i]: magnitude / weights[i] for i, magnitude in amax.items() if weights[i]}
        found = self
        if everything and self.assumed:
            found = self._after_finite_pass(gains, explained=measured.shows_overflows)
        found = found._replace(
            now=_larger(self.now, gains),
            entry_complete=self.entry_complete or completes_entry,
            informative=self.informative or informative,
            not_exchanged=self.not_exchanged or measured.measured_all,
            settled=self.settled and not again,
        )
        known = self.gains_of(names)
        counts = measured.measured_all or measured.has_gradients
        unseen = {
            i for i in components.computed if weights[i] and (known[i] is None or (counts and not known[i]))
        }
        return found._after_first_look(known, unseen, measured) if unseen else found

    def _after_finite_pass(self, gains: _Gains, *, explained: bool) -> Seen:
        """Drop provisional gains, as a finite pass over the same batch has measured these `gains`."""
        # If none of these explains the overflow, it was inside a function, and shows in no gradient.
        inside = {name: self.assumed[name] for name in self.began if name in self.assumed}
        if explained or any(gains.get(name, 0.0) * _CONFIRMS >= gain for name, gain in inside.items()):
            inside = {}
        return self._replace(assumed=_NONE, began=frozenset(), lost=_larger(self.lost, inside))

    def _after_first_look(
        self, known: Sequence[Optional[float]], unseen: AbstractSet[int], measured: PassMeasurements
    ) -> Seen:
        """Decide whether a first measurement of `unseen` requires a rerun; `known`: the gains before it."""
        schedule, policy = measured.schedule, self.policy
        components, names = schedule.components, schedule.components.names
        new = {index for index in unseen if self.gain(names[index])}
        unsettled = any(
            _scale(policy, self.now[names[i]], schedule.loss_weights[i], measured.u_max[i])
            > schedule.component_scales[i] * policy.margin
            for i in new
        )
        zero = unseen - new
        if not (measured.measured_all and measured.finite and zero):
            return self._replace(settled=self.settled and not unsettled)
        # With their next scales, these may bring larger gradients to their descendants.
        behind = set().union(*map(components.behind, new))
        # The loss gradient is not zero.
        nonzero = {components.root, *(index for index, gain in enumerate(known) if gain)}
        follow = {edge.after for edge in components.edges if edge.layer is None and edge.before in nonzero}
        underflowed = {names[i] for i in zero & (follow | {components.root})} - self.memory.windows.keys()
        unsettled |= not underflowed <= self.underflowed or not behind.isdisjoint(zero)
        return self._replace(
            underflowed=self.underflowed | underflowed, settled=self.settled and not unsettled
        )

    def after_overflow(self, measured: PassMeasurements) -> Tuple[Seen, bool]:
        """Lower scales from the overflow on; False: no overflow, or its scale is at the minimum."""
        # Descendants have usually grown, too, and would overflow in turn.
        first, schedule, policy = measured.overflowed, measured.schedule, self.policy
        components, weights = schedule.components, schedule.loss_weights
        if first is None:
            return self, False
        used, assumed = schedule.component_scales, {**self.assumed}
        for index in set().union(*map(components.behind, (first, *measured.suspected))):
            name, u_max = components.names[index], measured.u_max[index]
            gain, scale, (small, large) = self.gain(name), used[index], _parts(weights[index])
            # Unmeasured components follow from their predecessors.
            if not small or not (index == first or gain or name in assumed):
                continue
            if gain and index != first:
                known = max(gain, assumed.get(name, 0.0))
                scale = min(_scale(policy, known, weights[index], u_max), scale)
            assumed[name] = policy.assumed(policy.after_overflow(scale * large), u_max=u_max) / small
        weight = weights[first]
        lowered = weight > 0.0 and not policy.at_floor(used[first] * _parts(weight)[1])
        began = self.began.union(components.names[index] for index in (first, *measured.suspected))
        return self._replace(assumed=assumed, began=began), lowered

    def after_lost_batch(self) -> Seen:
        """Keep the provisional gains of an overflow: no pass over this batch will measure them."""
        lost = _larger(_larger(self.lost, self.now), self.assumed)
        return self._replace(now=_NONE, assumed=_NONE, began=frozenset(), lost=lost)

    @property
    def _learned(self) -> _Gains:
        """Gains of this iteration; zeros for new components if it is not informative."""
        if self.informative:
            return self.now
        return {name: 0.0 for name in self.now if name not in self.memory.windows}

    def shared(self) -> Tuple[bool, _Gains, _Gains]:
        """Export for other ranks: completeness of a windows' entry, gains, gains of lost batches."""
        return self.entry_complete, self._learned, _larger(self.lost, self.assumed)

    def adopting(self, entry_complete: bool, gains: _Gains, lost: _Gains) -> Seen:
        """Replace this rank's gains by the largest `shared` ones of all ranks."""
        found = self._replace(entry_complete=entry_complete, informative=True, now=gains, lost=lost)
        return found._replace(assumed=_NONE, began=frozenset())

    @property
    def remembers_loss(self) -> bool:
        """True if scales are low because of a lost batch, of any component."""
        return bool(self.memory.lost or self.lost)

    def remembered(self, *, good: bool = False) -> Memory:
        """Memory with the gains of this iteration, and the provisional ones unless it ended `good`."""
        seen = self.after_lost_batch() if self.assumed and not good else self
        if not (seen.now or seen.lost or seen.entry_complete):
            return self.memory
        return self.memory.after(
            seen._learned, completes_entry=self.entry_complete, lost=seen.lost, iteration=self.iteration
        )

    def after_iteration(self, *, good: bool = False) -> Seen:
        """End the iteration, with the memory that it has `remembered`."""
        if not (self.now or self.lost or self.assumed or self.entry_complete):
            return self
        return self._replace(memory=self.remembered(good=good)).without_iteration()

    def without_iteration(self) -> Seen:
        """Drop the measurements of this iteration."""
        return Seen(self.memory, self.iteration, self.attempt, self.last_pass, self.settled)

    def without_batch(self) -> Seen:
        """Drop the measurements of this iteration, except of batches lost before."""
        return self.without_iteration()._replace(lost=self.lost)

    def state_dict(self) -> Dict[str, Any]:
        """Memory as plain lists; the iteration ends."""
        return self.remembered().state_dict()

    def gains(self) -> Dict[str, float]:
        """Largest gain in the window of each component, by name."""
        return {name: window.amax for name, window in self.memory.windows.items()}

    def amaxes(self) -> Dict[str, float]:
        """Largest magnitude of each component with the loss weights of the last pass."""
        weights = dict(zip(*self.last_pass))
        return {name: gain * weights.get(name, 1.0) for name, gain in self.gains().items()}


def _scale(policy: HistoryPolicy, gain: float, weight: float, u_max: float) -> float:
    """Scale limit of gradients of at most `gain * weight`."""
    small, large = _parts(weight)
    return within_float32(policy.scale(max(gain * small, sys.float_info.min), u_max=u_max) / large)


def _parts(weight: float) -> Tuple[float, float]:
    """Split a loss weight into factors of at most and at least 1; only the second lowers `min_scale`."""
    # An unread factor, such as that of a logarithm, may cancel the first.
    return min(weight, 1.0), max(weight, 1.0)


def _larger(one: _Gains, other: _Gains) -> _Gains:
    """Larger values of both, by name."""
    if not (one and other):
        return one or other
    return {**one, **{n: value for n, value in other.items() if n not in one or value > one[n]}}
