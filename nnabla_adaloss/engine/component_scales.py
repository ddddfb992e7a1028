# SPDX-License-Identifier: Apache-2.0
"""What was measured of a network's components: the state from which scales are chosen.

All of it are gains: largest magnitudes, divided by the loss weight of the component in the batch that showed
them. So a loss weight that changes moves the scales, and nothing that is remembered.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from ..core.scale_history import AmaxWindow, HistoryPolicy
from ..core.validation import number
from ..graph.components import Components
from .choose import Room, within_float32
from .report import PassReport

_EMPTY = AmaxWindow()


class ComponentScales:
    """Windows of gains by the name of a component, so that they outlive a graph that is built again."""

    undone = "_windows", "_partial", "_weights", "began"

    def __init__(self, policy: HistoryPolicy) -> None:
        self.policy = policy
        # False when the last pass was the first to measure a component, and used a scale for it that is more
        # than a margin too low, or has left others dark behind it: the same batch, once more, gives better
        # gradients.
        self.settled = True
        # The iteration of the pass that began last, and the number of the pass in it.
        self.began: Tuple[int, int] = -1, 0
        # The names of the components in the pass that began last, and their loss weights.
        self._weights: Tuple[Sequence[str], Sequence[float]] = (), ()
        self._windows: Dict[str, AmaxWindow] = {}
        # What was measured since the last entry of the windows, where that takes several iterations.
        self._partial: Dict[str, float] = {}
        self.drop_iteration()

    def drop_iteration(self) -> None:
        """Forget what this iteration has seen, as if it had not been."""
        # What it has seen; what is assumed since an overflow, until a finite pass over the same batch shows
        # what is so; and what batches have shown that were lost.
        self._seen: Dict[str, float] = {}
        self._assumed: Dict[str, float] = {}
        self._lost: Dict[str, float] = {}
        # Components that were zero at the first look, though what they follow from was known not to be.
        self._dark: Set[str] = set()
        # Whether all was measured that makes an entry of the windows; whether a batch tells of gradients.
        self._measured_all = self._tells = False
        # Whether single batches were measured, of which other ranks do not know yet.
        self.alone = False

    def gain(self, name: str) -> Optional[float]:
        """The largest gain of a component; None where nothing was measured."""
        window = self._windows.get(name)
        known = None if window is None else window.amax
        for since in (self._partial, self._lost, self._seen):
            if name in since and (known is None or since[name] > known):
                known = since[name]
        return known

    def _scale(self, gain: float, weight: float, u_max: float) -> float:
        """The scale that gradients leave room for which are at most `gain * weight`."""
        return min(within_float32(self.policy.scale(gain, u_max=u_max) / weight), self.policy.max_scale)

    def room(self, components: Components, weights: Tuple[float, ...], limits: Sequence[float]) -> Room:
        """What the next scales of a graph are chosen from; `weights` are the loss weights of its components,
        `limits` the largest magnitudes that their gradients can have.
        """
        gains = list(map(self.gain, components.names))
        scales: List[Optional[float]] = []
        ceilings: Dict[int, float] = {}
        for index, (name, gain, weight, u_max) in enumerate(zip(components.names, gains, weights, limits)):
            assumed = self._assumed.get(name, 0.0)
            if weight and assumed:
                ceilings[index] = self._scale(assumed, weight, u_max)
            known = bool(gain and weight)
            scales.append(self._scale(max(gain or 0.0, assumed), weight, u_max) if known else None)
        dark = {i for i, name in enumerate(components.names) if name in self._dark}
        # After an overflow nobody knows how large gradients have become: each goes as low as it has to.
        return Room(scales, ceilings, weights, gains, dark, level=not self._assumed)

    @property
    def limited(self) -> bool:
        """Whether an overflow holds scales down that a finite pass over the same batch may raise again."""
        return bool(self._assumed)

    def begin_pass(self, iteration: int, names: Sequence[str], weights: Sequence[float]) -> None:
        """Count a pass of an iteration, with the loss weights of these components, and end the one before if
        this is another.
        """
        attempt = self.began[1] + 1 if self.began[0] == iteration else 0
        self.began, self.settled, self._weights = (iteration, attempt), True, (names, weights)
        if not attempt and (self._measured_all or self._seen or self._lost or self._assumed):
            self.end_iteration()

    def learn(
        self, components: Components, limits: Sequence[float], report: PassReport, *, last: bool
    ) -> None:
        """Take over what a pass has measured of the components that are present in the batch."""
        self._measured_all |= last
        self.alone |= report.measured_all
        amax, names, weights = report.amax, components.names, report.schedule.weights
        everything = report.measured_all and not report.found_inf
        if everything:
            # Where backward leaves no array, it is zero.
            amax = {**dict.fromkeys(components.measured, 0.0), **amax}
        known = list(map(self.gain, names))
        counts = report.measured_all or any(report.largest)
        dark = {
            i for i in components.measured if weights[i] and (known[i] is None or (counts and not known[i]))
        }
        for index, magnitude in amax.items():
            if weights[index]:
                gain = magnitude / weights[index]
                self._seen[names[index]] = max(gain, self._seen.get(names[index], 0.0))
        lit = {index for index in dark if self.gain(names[index])}
        for index in lit:
            wanted = self._scale(self._seen[names[index]], weights[index], limits[index])
            if wanted > report.schedule.components[index] * self.policy.margin:
                self.settled = False
        if everything and dark > lit:
            self._look_again(components, known, lit, dark - lit)

    def _look_again(
        self, components: Components, known: Sequence[Optional[float]], lit: Set[int], dark: Set[int]
    ) -> None:
        """Have the batch run once more if that may show more of what is `dark`, after a pass that has shown
        others for the first time. `known` are the gains before it.
        """
        names, root = components.names, components.root
        # With the scales that they get now, these may bring more to what is behind them.
        behind: Set[int] = set().union(*map(components.behind, lit)) if lit else set()
        # The loss gradient itself is not zero.
        fed = {e.after for e in components.edges if e.layer is None and (known[e.before] or e.before == root)}
        new = {names[i] for i in dark & (fed | {root}) if names[i] not in self._windows} - self._dark
        self._dark |= new
        if new or behind & dark:
            self.settled = False

    def after_overflow(self, components: Components, limits: Sequence[float], report: PassReport) -> bool:
        """Lower the component that overflowed in a pass, and all behind it; False when none did, or it cannot
        go lower.

        A pass that overflows says nothing about what is behind: gradients have mostly grown there, too, and
        each component would overflow in turn. What is assumed of them holds until a finite pass over the same
        batch, or, where the batch is lost, as an entry of the windows.
        """
        first = report.overflowed
        if first is None:
            return False
        names, policy, weights = components.names, self.policy, report.schedule.weights
        # A loss weight of 1 would need these scales.
        used = [scale * weight for scale, weight in zip(report.schedule.components, weights)]
        for index in set().union(*map(components.behind, (first, *report.suspected))):
            name, gain = names[index], self.gain(names[index])
            # What nothing is known of follows from what is before it.
            if weights[index] and (index == first or gain or name in self._assumed):
                present = used[index]
                if gain and index != first:
                    gain = max(gain, self._assumed.get(name, 0.0))
                    present = min(policy.scale(gain, u_max=limits[index]), present)
                lower = policy.after_overflow(present)
                self._assumed = {**self._assumed, name: policy.assumed(lower, u_max=limits[index])}
        return not policy.at_floor(used[first])

    def lose_batch(self) -> None:
        """Remember what was assumed since an overflow: no pass over this batch will show what is so."""
        self._lost = _larger(_larger(self._lost, self._seen), self._assumed)
        self._seen, self._assumed = {}, {}

    def keep_batch(self) -> None:
        """Forget what was assumed since an overflow: a finite pass over the same batch has measured it."""
        self._assumed = {}

    def count_batch(self, *, tells: bool) -> None:
        """Count the batch of the last pass; one whose loss is zero, as without a reward, tells nothing of how
        large gradients are.
        """
        self._tells |= tells

    @property
    def _learned(self) -> Dict[str, float]:
        """What is remembered of what this iteration has seen; else only what there is, with zeros."""
        if self._tells:
            return self._seen
        return {name: 0.0 for name in self._seen if name not in self._windows}

    def shared(self) -> Tuple[bool, Dict[str, float]]:
        """For other ranks: whether this iteration ends an entry of the windows, and the gains in it by name.
        What is assumed of a lost batch counts.
        """
        return self._measured_all, _larger(_larger(self._lost, self._learned), self._assumed)

    def adopt(self, measured_all: bool, gains: Mapping[str, float]) -> None:
        """Take the largest that all ranks have `shared` for what this one has."""
        self._measured_all, self._tells, self._seen = measured_all, True, {**gains}
        self._assumed, self._lost = {}, {}

    def end_iteration(self, *, good: bool = False) -> None:
        """What this iteration has seen becomes an entry of the windows, or a part of one; so does what was
        assumed since an overflow, unless its last pass was `good`.
        """
        if self._assumed and not good:
            self.lose_batch()
        if self._seen or self._lost or self._measured_all:
            windows, length = self._windows, self.policy.window
            partial = _larger(_larger(self._partial, self._lost), self._learned)
            if self._measured_all:
                pushed = {n: windows.get(n, _EMPTY).push(gain, length) for n, gain in partial.items()}
                windows, partial = {**windows, **pushed}, {}
            self._windows, self._partial = windows, partial
        self.drop_iteration()

    def gains(self) -> Dict[str, float]:
        """The largest gain in the window of each component, by name: the same on all ranks."""
        return {name: window.amax for name, window in self._windows.items()}

    def amaxes(self) -> Dict[str, float]:
        """The largest magnitude that each component would have with the loss weights of the last pass."""
        weights = dict(zip(*self._weights))
        return {name: gain * weights.get(name, 1.0) for name, gain in self.gains().items()}

    def restart(self, start_scale: float) -> None:
        """Forget everything, and start with another scale."""
        self.policy = replace(self.policy, start_scale=start_scale)
        self.forget()

    def forget(self) -> None:
        """Forget everything."""
        self._windows, self._partial = {}, {}
        self.drop_iteration()

    def state_dict(self) -> Dict[str, Any]:
        """What was measured, by name of the component, as plain lists; this iteration ends with it."""
        ended = copy(self)
        ended.end_iteration()
        windows = {name: window.as_list() for name, window in ended._windows.items()}
        return {"windows": windows, "partial": ended._partial}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; nothing changes when it raises KeyError, TypeError,
        AttributeError or ValueError.
        """
        windows = {str(name): AmaxWindow.from_list(values) for name, values in state["windows"].items()}
        partial = {str(name): number("partial", value) for name, value in state["partial"].items()}
        self._windows, self._partial = windows, partial
        self.began = -1, 0
        self.drop_iteration()


def _larger(one: Mapping[str, float], other: Mapping[str, float]) -> Dict[str, float]:
    """The larger of both, by name."""
    return {**one, **{n: value for n, value in other.items() if value > one.get(n, -1.0)}}
