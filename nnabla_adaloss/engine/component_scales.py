# SPDX-License-Identifier: Apache-2.0
"""What was measured of a network's components: the state from which scales are chosen."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from ..core.scale_history import AmaxWindow, HistoryPolicy
from ..core.validation import integer, number
from ..graph.components import Components
from .choose import Room
from .report import PassReport

# So many passes over a batch look for the gradients of a component that was zero.
_SEARCHES = 5

# How far the gradients of a batch that was searched must lie below those before to have been worth it.
_FAR = 2.0**8

# So many batches in a row that had to be searched: it is what came before that is out of line.
_IN_A_ROW = 4

_EMPTY = AmaxWindow()


class Searches(NamedTuple):
    """What came of running batches with scales of their own."""

    in_vain: int = 0  # how many in a row have found no smaller gradients; each doubles how many are left out
    left_out: int = 0  # how many are left out now
    in_a_row: int = 0  # how many iterations in a row were searched, and not in vain
    last: int = -1  # the last of them

    def after(self, iteration: int, *, worth: bool) -> Searches:
        """After one more search."""
        if not worth:
            return Searches(self.in_vain + 1, 2 << self.in_vain)
        return Searches(0, 0, self.in_a_row + 1 if iteration == self.last + 1 else 1, iteration)


class ComponentScales:
    """Windows of magnitudes by the name of a component, so that they outlive a graph that is built again."""

    undone = "_windows", "_partial", "_searches", "began"

    def __init__(self, policy: HistoryPolicy, u_max: float, u_max_single: Optional[float] = None) -> None:
        self.policy = policy
        self._u_max = u_max
        self._u_max_single = u_max if u_max_single is None else u_max_single
        self._single: FrozenSet[str] = frozenset()
        self._limits: Mapping[str, float] = MappingProxyType({})
        # False when the last pass was the first to measure a component, and used a scale for it that is more
        # than a margin too low, or saw nothing but zeros: the same batch, once more, gives better gradients.
        self.settled = True
        # The iteration of the pass that began last, and the number of the pass in it.
        self.began: Tuple[int, int] = -1, 0
        self._windows: Dict[str, AmaxWindow] = {}
        # What was measured since the last entry of the windows, where that takes several iterations.
        self._partial: Dict[str, float] = {}
        self._searches = Searches()
        self.drop_iteration()

    def drop_iteration(self) -> None:
        """Forget what this iteration has seen, as if it had not been."""
        # What it has seen; what is assumed since an overflow, until a finite pass over the same batch shows
        # what is so; and what batches have shown that were lost.
        self._seen: Dict[str, float] = {}
        self._assumed: Dict[str, float] = {}
        self._lost: Dict[str, float] = {}
        # Whether all was measured that makes an entry of the windows.
        self._measured_all = False
        # Whether single batches were measured, of which other ranks do not know yet.
        self.alone = False
        # In how many passes a component was nothing but zeros, and with which scale in the last one.
        self._zeros: Dict[str, int] = {}
        self._tried: Dict[str, float] = {}
        # Whether it has scales of its own, as a first batch has, and where gradients are not zero in the last
        # pass that was run for that.
        self.searching = False
        self._shown: Set[str] = set()

    def u_max(self, name: str) -> float:
        """The largest magnitude that a gradient of a component can have."""
        return self._limits.get(name, self._u_max_single if name in self._single else self._u_max)

    def _amax(self, name: str) -> Optional[float]:
        """The largest magnitude that was measured; None where nothing was."""
        window = None if self.searching else self._windows.get(name)
        known = None if window is None else window.amax
        for since in (self._seen,) if self.searching else (self._partial, self._lost, self._seen):
            if name in since and (known is None or since[name] > known):
                known = since[name]
        return known

    def scale(self, name: str) -> Optional[float]:
        """The scale that what was measured of a component leaves room for; None where it was nothing, or
        nothing but zeros.
        """
        amax = self._amax(name)
        if not amax:
            return None
        return self.policy.scale(max(amax, self._assumed.get(name, 0.0)), u_max=self.u_max(name))

    def room(self, components: Components, limits: Mapping[str, float] = MappingProxyType({})) -> Room:
        """What the next scales of a graph are chosen from."""
        self._limits, self._single = limits, components.single
        names, policy = components.names, self.policy
        ceilings = [
            policy.scale(self._assumed[name], u_max=self.u_max(name)) if name in self._assumed else math.inf
            for name in names
        ]
        scales = list(map(self.scale, names))
        # After an overflow nobody knows how large gradients have become: each goes as low as it has to.
        return Room(scales, ceilings, [self._tried.get(n) for n in names], level=not self._assumed)

    @property
    def limited(self) -> bool:
        """Whether an overflow holds scales down that a finite pass over the same batch may raise again."""
        return bool(self._assumed)

    def amaxes_of(self, components: Components) -> List[Optional[float]]:
        """The largest magnitude of each component; None where nothing was measured."""
        return list(map(self._amax, components.names))

    def begin_pass(self, iteration: int) -> int:
        """Count a pass of an iteration, and end the one before if this is another; return its number."""
        attempt = self.began[1] + 1 if self.began[0] == iteration else 0
        self.began, self.settled = (iteration, attempt), True
        if not attempt and (
            self._measured_all or self._seen or self._lost or self._assumed or self.searching
        ):
            self.end_iteration()
        return attempt

    def learn(self, components: Components, report: PassReport, *, last: bool) -> None:
        """Take over what a pass has measured."""
        self._measured_all |= last
        amax, seen, used = report.amax, self._seen, report.schedule.components
        without = [i for i, name in enumerate(components.names) if not self._amax(name)]
        self.alone |= report.measured_all
        if report.measured_all and not report.found_inf:
            # Where backward leaves no array, it is zero.
            amax = {**dict.fromkeys(components.measured, 0.0), **amax}
        for index, magnitude in amax.items():
            name = components.names[index]
            if name not in seen or magnitude > seen[name]:
                seen[name] = magnitude
        for index in without:
            if index not in amax:
                continue
            name, wanted = components.names[index], self.scale(components.names[index])
            if wanted is not None:
                self.settled = self.settled and wanted <= used[index] * self.policy.margin
            elif report.measured_all:
                self._look_further(components, report, index)
        if self.searching:
            self._shown = {components.names[index] for index, magnitude in amax.items() if magnitude}

    def _look_further(self, components: Components, report: PassReport, index: int) -> None:
        """Have a larger scale tried where a component was zero, as long as that may show more."""
        name = components.names[index]
        tries = self._zeros.get(name, int(name in self._windows and not self.searching))
        self._zeros[name] = tries + 1
        # What a program has no gradient for is looked for once; the loss gradient itself is not zero. Where
        # gradients of several elements came in, not all zero, they may have underflowed.
        is_root = index == components.root
        fed = any(
            report.amax.get(before)
            and index in following
            and components.names[before] not in components.single
            for before, following in enumerate(components.next)
        )
        fed = fed or is_root or name in self._tried or index in report.flushed
        if not tries or (tries < _SEARCHES and fed):
            self.settled = False
            if tries or is_root:
                self._tried[name] = report.schedule.components[index]

    def after_overflow(self, components: Components, report: PassReport) -> bool:
        """Lower the component that overflowed in a pass, and all behind it; False when none did, or it cannot
        go lower.

        A pass that overflows says nothing about what is behind: gradients have mostly grown there, too, and
        each component would overflow in turn. What is assumed of them holds until a finite pass over the same
        batch, or, where the batch is lost, as an entry of the windows.
        """
        if report.overflowed is None:
            return False
        names, used, first = components.names, report.schedule.components, report.overflowed
        scale, name = used[first], names[first]
        if self._tried.pop(name, None) is not None:
            # It was only tried whether a larger scale shows more.
            self._zeros[name] = _SEARCHES
            return True
        for index in set().union(*map(components.behind, (first, *report.suspected))):
            # What nothing is known of follows from what is before it.
            if index == first or self._amax(names[index]) or names[index] in self._assumed:
                present = None if index == first else self.scale(names[index])
                lower = self.policy.after_overflow(min(present or used[index], used[index]))
                self._assumed[names[index]] = self.policy.assumed(lower, u_max=self.u_max(names[index]))
        return not self.policy.at_floor(scale)

    def lose_batch(self) -> None:
        """Remember what was assumed since an overflow: no pass over this batch will show what is so."""
        self._lost = _larger(_larger(self._lost, self._seen), self._assumed)
        self._seen, self._assumed = {}, {}

    def keep_batch(self) -> None:
        """Forget what was assumed since an overflow: a finite pass over the same batch has measured it."""
        self._assumed = {}

    def search(self, names: Sequence[str]) -> None:
        """Have the batch run again with scales of its own, if these components have had gradients before:
        those of the batch are far smaller, or underflow to zero.
        """
        known = ((self._windows.get(name, _EMPTY).amax, self._partial.get(name)) for name in names)
        if self.searching or not any(map(any, known)):
            return
        if self._searches.left_out:
            self._searches = self._searches._replace(left_out=self._searches.left_out - 1)
            return
        self.searching, self.settled = True, False
        self._seen = {}

    @property
    def _kept(self) -> Mapping[str, float]:
        """What counts of this iteration. Of a search that is what its gradients have in the end: what one of
        its passes has seen may be gone with the scales that follow from it.
        """
        seen = self._seen
        return {n: m if n in self._shown else 0.0 for n, m in seen.items()} if self.searching else seen

    def _end_search(self) -> None:
        self._seen = {**self._kept}
        found = (
            (max(self._windows.get(name, _EMPTY).amax, self._partial.get(name, 0.0)), magnitude)
            for name, magnitude in self._seen.items()
            if magnitude and name not in self._single
        )
        # An entry of a window is what ordinary batches have shown.
        self._measured_all = False
        worth = any(before == 0.0 or before > magnitude * _FAR for before, magnitude in found)
        self._searches = self._searches.after(self.began[0], worth=worth)
        if self._searches.in_a_row == _IN_A_ROW:
            # What is in the windows was a single outlier: they begin with this iteration.
            self._windows, self._partial, self._measured_all = {}, {}, True

    def shared(self, names: Sequence[str]) -> List[float]:
        """For other ranks: whether this iteration ends an entry of the windows, whether it had scales of its
        own, and the largest magnitude of each component in it; -1 where none. What is assumed of a lost batch
        counts.
        """
        seen = _larger(_larger(self._lost, self._kept), self._assumed)
        return [float(self._measured_all), float(self.searching), *(seen.get(name, -1.0) for name in names)]

    def adopt(self, names: Sequence[str], largest: Sequence[float]) -> None:
        """Take the largest that all ranks have `shared` for what this one has."""
        self._measured_all, self.searching = bool(largest[0]), bool(largest[1])
        self._seen = {name: magnitude for name, magnitude in zip(names, largest[2:]) if magnitude >= 0.0}
        self._assumed, self._lost = {}, {}
        self._shown = {*self._seen}

    def end_iteration(self, *, good: bool = False) -> None:
        """What this iteration has seen becomes an entry of the windows, or a part of one; so does what was
        assumed since an overflow, unless its last pass was `good`.
        """
        if self._assumed and not good:
            self.lose_batch()
        if self.searching:
            self._end_search()
        if self._seen or self._lost or self._measured_all:
            windows, length = self._windows, self.policy.window
            partial = _larger(_larger(self._partial, self._lost), self._seen)
            if self._measured_all:
                pushed = {n: windows.get(n, _EMPTY).push(amax, length) for n, amax in partial.items()}
                windows, partial = {**windows, **pushed}, {}
            self._windows, self._partial = windows, partial
        self.drop_iteration()

    def amaxes(self) -> Dict[str, float]:
        """The largest magnitude in the window of each component, by name."""
        return {name: window.amax for name, window in self._windows.items()}

    def restart(self, start_scale: float) -> None:
        """Forget everything, and start with another scale."""
        self.policy = replace(self.policy, start_scale=start_scale)
        self.forget()

    def forget(self) -> None:
        """Forget everything."""
        self._windows, self._partial, self._searches = {}, {}, Searches()
        self.drop_iteration()

    def state_dict(self) -> Dict[str, Any]:
        """What was measured, by name of the component, as plain lists; this iteration ends with it."""
        ended = copy(self)
        ended.end_iteration()
        windows = {name: window.as_list() for name, window in ended._windows.items()}
        return {"windows": windows, "partial": ended._partial, "searches": list(ended._searches)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; nothing changes when it raises KeyError, TypeError,
        AttributeError or ValueError.
        """
        windows = {str(name): AmaxWindow.from_list(values) for name, values in state["windows"].items()}
        partial = {str(name): number("partial", value) for name, value in state["partial"].items()}
        searches = Searches(*(integer("searches", value) for value in state["searches"]))
        self._windows, self._partial, self._searches = windows, partial, searches
        self.began = -1, 0
        self.drop_iteration()


def _larger(one: Dict[str, float], other: Mapping[str, float]) -> Dict[str, float]:
    """The larger of both, by name."""
    return {**one, **{n: value for n, value in other.items() if value > one.get(n, -1.0)}} if other else one
