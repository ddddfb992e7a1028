# SPDX-License-Identifier: Apache-2.0
"""Memory of a network's components, and the measurements of this iteration.

All of it are gains: largest magnitudes, divided by the loss weight of the component in the batch that showed
them. So a loss weight that changes moves the scales, and nothing that is remembered.

Nothing here changes: what a pass, an overflow or another rank adds is in a new `Seen`. So a savepoint is a
reference, and a batch that is broken off leaves no trace. Components go by name, as they outlive a graph that
is built again.
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
    """A gain that has lost a batch, beyond the margin above the windows."""

    gain: float
    until: int  # the last iteration that remembers it
    shown: float = 0.0  # the largest since for which windows had left no room, either


class Memory(NamedTuple):
    """What all iterations before have left: the same on all ranks."""

    policy: HistoryPolicy  # how scales follow from it
    windows: Mapping[str, AmaxWindow] = {}
    partial: _Gains = _NONE  # since the last entry of the windows, where that takes several iterations
    lost: Mapping[str, LostGain] = {}

    def after(self, gains: _Gains, *, completes_entry: bool, lost: _Gains = _NONE, iteration: int) -> Memory:
        """Add the gains of one more iteration, and of the batches that it has `lost`."""
        gains = _larger(lost, gains)
        memory = self._after_losses(gains, lost, iteration) if self.lost or lost else self
        partial = _larger(self.partial, gains)
        if not completes_entry:
            return memory._replace(partial=partial)
        windows, length = self.windows, self.policy.window
        pushed = {name: windows.get(name, _EMPTY).push(gain, length) for name, gain in partial.items()}
        return memory._replace(windows={**windows, **pushed}, partial=_NONE)

    def _after_losses(self, gains: _Gains, lost: _Gains, iteration: int) -> Memory:
        """Add losses; `gains` that come near earlier ones prolong them."""
        # In time, others fall to where the largest gain since comes near that had no room, or are forgotten.
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
        """Whether windows leave no room for a gain; a first measurement says nothing of others."""
        return gain > self.policy.margin * self.windows.get(name, _EMPTY).amax > 0.0

    def state_dict(self) -> Dict[str, Any]:
        """It as plain lists, for saving."""
        windows = {name: window.as_list() for name, window in self.windows.items()}
        lost = {name: list(one) for name, one in self.lost.items()}
        return {"windows": windows, "partial": {**self.partial}, "lost": lost}

    def loaded(self, state: Mapping[str, Any]) -> Memory:
        """What `state_dict` returned, with this policy; KeyError, TypeError, AttributeError or ValueError."""
        windows = {str(name): AmaxWindow.from_list(values) for name, values in state["windows"].items()}
        partial = {str(n): nonnegative_number("partial", value) for n, value in state["partial"].items()}
        # Older states remember no lost batch.
        lost = {
            str(name): LostGain(
                nonnegative_number("lost", gain), integer("until", until), nonnegative_number("shown", shown)
            )
            for name, (gain, until, shown) in state.get("lost", {}).items()
        }
        return Memory(self.policy, windows, partial, lost)


class PassMeasurements(NamedTuple):
    """Measurements of one pass; components go by index."""

    schedule: ScaleSchedule  # that the pass ran with
    u_max: Sequence[float]  # the largest magnitude that gradients of each component can have
    amax: Mapping[int, float]  # the largest magnitude of each measured component, unscaled
    measured_all: bool = False  # whether every gradient was measured
    shows_overflows: bool = False  # whether each overflow shows in a gradient, as emulated storage rounds
    finite: bool = True
    has_gradients: bool = True  # whether the gradient of any parameter is not zero
    overflowed: Optional[int] = None  # the first component in backward order that was not finite
    suspected: AbstractSet[int] = frozenset()  # predecessors of it that may not have been finite, either


class Seen(NamedTuple):
    """What this iteration has measured so far, beside what is remembered."""

    memory: Memory
    iteration: int = -1
    attempt: int = 0  # the number of the pass in it that began last
    last_pass: Tuple[Sequence[str], Sequence[float]] = ((), ())  # its components, and their loss weights
    # False: the batch is to run again. The pass has measured a component for the first time, and its scale
    # was more than a margin too low; or what is behind it was zero, and may not be with the next scale.
    settled: bool = True
    now: _Gains = _NONE
    # Gains that an overflow has us assume; the next finite pass over the same batch replaces them.
    assumed: _Gains = _NONE
    began: FrozenSet[str] = frozenset()  # components where these overflows may have begun
    lost: _Gains = _NONE  # of batches that were lost, and those that no measurement explains
    underflowed: FrozenSet[str] = frozenset()  # zero when first measured, unlike what they follow from
    entry_complete: bool = False  # whether all was measured that makes an entry of the windows
    informative: bool = False  # whether a batch had a loss that is not zero
    not_exchanged: bool = False  # whether single batches were measured, of which other ranks do not know yet

    @property
    def policy(self) -> HistoryPolicy:
        """How scales follow from what is known."""
        return self.memory.policy

    def gain(self, name: str) -> Optional[float]:
        """The largest gain of a component; None where nothing was measured."""
        return self.gains_of([name])[0]

    def gains_of(self, names: Sequence[str]) -> List[Optional[float]]:
        """`gain` of many components."""
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
        """The limits that scales are chosen from; `u_max` has the largest magnitude of each component."""
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
            # After an overflow nobody knows how large gradients have become: each goes as low as it has to.
            equalize=not self.assumed,
        )

    def before_pass(self, iteration: int, names: Sequence[str], weights: Sequence[float]) -> Seen:
        """With one more pass, with these loss weights; after the iteration before, if this is another."""
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
        """Add the measurements of a pass; `informative`: its loss is not zero; `again`: it runs once more."""
        components, weights = measured.schedule.components, measured.schedule.loss_weights
        names, amax, everything = components.names, measured.amax, measured.measured_all and measured.finite
        if everything:
            # A component for which backward wrote no array has a gradient of zero.
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
        """Drop assumed gains, as a finite pass over the same batch has measured these `gains`."""
        # Where none of these explains the overflow, it was within a function, and shows in no gradient.
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
        # With the scales that they get now, these may bring more to what is behind them.
        behind = set().union(*map(components.behind, new))
        # The loss gradient itself is not zero.
        nonzero = {components.root, *(index for index, gain in enumerate(known) if gain)}
        follow = {edge.after for edge in components.edges if edge.layer is None and edge.before in nonzero}
        underflowed = {names[i] for i in zero & (follow | {components.root})} - self.memory.windows.keys()
        unsettled |= not underflowed <= self.underflowed or not behind.isdisjoint(zero)
        return self._replace(
            underflowed=self.underflowed | underflowed, settled=self.settled and not unsettled
        )

    def after_overflow(self, measured: PassMeasurements) -> Tuple[Seen, bool]:
        """Lower scales from the overflow on; False: there was none, or its scale cannot go lower."""
        # Gradients behind it have usually grown, too, and would overflow in turn.
        first, schedule, policy = measured.overflowed, measured.schedule, self.policy
        components, weights = schedule.components, schedule.loss_weights
        if first is None:
            return self, False
        used, assumed = schedule.component_scales, {**self.assumed}
        for index in set().union(*map(components.behind, (first, *measured.suspected))):
            name, u_max = components.names[index], measured.u_max[index]
            gain, scale, (small, large) = self.gain(name), used[index], _parts(weights[index])
            # What nothing is known of follows from what is before it.
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
        """With what was assumed since an overflow: no pass over this batch will measure it."""
        lost = _larger(_larger(self.lost, self.now), self.assumed)
        return self._replace(now=_NONE, assumed=_NONE, began=frozenset(), lost=lost)

    @property
    def _learned(self) -> _Gains:
        """The gains of this iteration; of one that is not informative zeros, for components that are new."""
        if self.informative:
            return self.now
        return {name: 0.0 for name in self.now if name not in self.memory.windows}

    def shared(self) -> Tuple[bool, _Gains, _Gains]:
        """For other ranks: whether an entry of the windows is complete, gains, and those of lost batches."""
        return self.entry_complete, self._learned, _larger(self.lost, self.assumed)

    def adopting(self, entry_complete: bool, gains: _Gains, lost: _Gains) -> Seen:
        """Replace this rank's gains by the largest that all ranks have `shared`."""
        found = self._replace(entry_complete=entry_complete, informative=True, now=gains, lost=lost)
        return found._replace(assumed=_NONE, began=frozenset())

    @property
    def remembers_loss(self) -> bool:
        """Whether scales are low because of a batch that was lost, of any component."""
        return bool(self.memory.lost or self.lost)

    def remembered(self, *, good: bool = False) -> Memory:
        """The memory with the gains of this iteration, and with assumed ones, unless it ended `good`."""
        seen = self.after_lost_batch() if self.assumed and not good else self
        if not (seen.now or seen.lost or seen.entry_complete):
            return self.memory
        return self.memory.after(
            seen._learned, completes_entry=self.entry_complete, lost=seen.lost, iteration=self.iteration
        )

    def after_iteration(self, *, good: bool = False) -> Seen:
        """After the iteration, with all that it has `remembered`."""
        if not (self.now or self.lost or self.assumed or self.entry_complete):
            return self
        return self._replace(memory=self.remembered(good=good)).without_iteration()

    def without_iteration(self) -> Seen:
        """Without what this iteration has measured, as if it had not been."""
        return Seen(self.memory, self.iteration, self.attempt, self.last_pass, self.settled)

    def without_batch(self) -> Seen:
        """Without what this iteration has measured, except of batches that were lost before."""
        return self.without_iteration()._replace(lost=self.lost)

    def state_dict(self) -> Dict[str, Any]:
        """What is remembered, as plain lists; this iteration ends with it."""
        return self.remembered().state_dict()

    def gains(self) -> Dict[str, float]:
        """The largest gain in the window of each component, by name."""
        return {name: window.amax for name, window in self.memory.windows.items()}

    def amaxes(self) -> Dict[str, float]:
        """The largest magnitude that each component would have with the loss weights of the last pass."""
        weights = dict(zip(*self.last_pass))
        return {name: gain * weights.get(name, 1.0) for name, gain in self.gains().items()}


def _scale(policy: HistoryPolicy, gain: float, weight: float, u_max: float) -> float:
    """The scale that gradients leave room for which are at most `gain * weight`."""
    small, large = _parts(weight)
    return within_float32(policy.scale(max(gain * small, sys.float_info.min), u_max=u_max) / large)


def _parts(weight: float) -> Tuple[float, float]:
    """Factors of a loss weight, at most and at least 1; only the second lowers the smallest scale."""
    # A factor that could not be read, such as that of a logarithm, may undo the first.
    return min(weight, 1.0), max(weight, 1.0)


def _larger(one: _Gains, other: _Gains) -> _Gains:
    """The larger of both, by name."""
    if not (one and other):
        return one or other
    return {**one, **{n: value for n, value in other.items() if n not in one or value > one[n]}}
