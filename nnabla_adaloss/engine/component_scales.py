# SPDX-License-Identifier: Apache-2.0
"""What was measured of a network's components, and the scales that follow from it."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from types import MappingProxyType
from typing import (
    Any,
    Dict,
    FrozenSet,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

from ..core.scale_history import AmaxWindow, HistoryPolicy
from ..core.validation import integer, number
from ..graph.components import Components
from .component_pass import ComponentPass

_SEARCHES = 5

# How far the gradients of a batch that was searched must lie below those before to have been worth it.
_FAR = 2.0**8

# So many batches in a row that had to be searched: it is what came before that is out of line.
_IN_A_ROW = 4

_EMPTY = AmaxWindow()


class Searches(NamedTuple):
    """What came of running batches with scales of their own.

    Attributes:
        in_vain: how many in a row have found no smaller gradients; after each, twice as many are left out.
        left_out: how many are left out now.
        in_a_row: how many iterations in a row were searched, and not in vain.
        last: the last of them.
    """

    in_vain: int = 0
    left_out: int = 0
    in_a_row: int = 0
    last: int = -1

    def after(self, iteration: int, *, worth: bool) -> Searches:
        """After one more search."""
        if not worth:
            return Searches(self.in_vain + 1, 2 << self.in_vain)
        return Searches(0, 0, self.in_a_row + 1 if iteration == self.last + 1 else 1, iteration)


class ComponentScales:
    """Windows of magnitudes by the name of a component, so that they outlive a graph that is built again.

    Args:
        policy: how a scale follows from what was measured.
        u_max: the largest magnitude of the storage format.
        u_max_single: that of the format in which gradients of one element are stored. None: the same.

    Attributes:
        settled: False when the last pass was the first to measure a component, and used a scale for it that
            is more than a margin too low, or saw nothing but zeros: the same batch, once more, gives better
            gradients.
        began: the iteration of the pass that began last, on this graph or one before, and the number of the
            pass in it.
    """

    undone = "_windows", "_partial", "_searches", "began"

    def __init__(self, policy: HistoryPolicy, u_max: float, u_max_single: Optional[float] = None) -> None:
        self.policy = policy
        self._u_max = u_max
        self._u_max_single = u_max if u_max_single is None else u_max_single
        self._single: FrozenSet[str] = frozenset()
        self._limits: Mapping[str, float] = MappingProxyType({})
        self.settled = True
        self.began: Tuple[int, int] = -1, 0
        self._windows: Dict[str, AmaxWindow] = {}
        # What was measured since the last entry of the windows, where that takes several iterations.
        self._partial: Dict[str, float] = {}
        # Whether all was measured that makes an entry.
        self._measured_all = False
        # Of the present iteration: what was seen, and what is assumed since an overflow, until a finite pass
        # over the same batch shows what is so.
        self._seen: Dict[str, float] = {}
        self._assumed: Dict[str, float] = {}
        # In how many passes of it a component was nothing but zeros, and with which scale in the last one.
        self._zeros: Dict[str, int] = {}
        self._tried: Dict[str, float] = {}
        # Whether it has scales of its own, as a first batch has; what came of such searches before.
        self._searching = False
        self._searches = Searches()

    def u_max(self, name: str) -> float:
        """The largest magnitude that a gradient of a component can have."""
        return self._limits.get(name, self._u_max_single if name in self._single else self._u_max)

    def scale(self, name: str) -> Optional[float]:
        """The scale of a component; None while nothing is known of it."""
        window = None if self._searching else self._windows.get(name)
        amax = 0.0 if window is None else window.amax
        partial = {} if self._searching else self._partial
        for since in (partial, self._seen, self._assumed):
            if name in since and since[name] > amax:
                amax = since[name]
        return self.policy.scale(amax, u_max=self.u_max(name)) if amax else None

    def begin_pass(self, iteration: int) -> int:
        """Count a pass of an iteration, and end the one before if this is another; return its number."""
        attempt = self.began[1] + 1 if self.began[0] == iteration else 0
        self.began, self.settled = (iteration, attempt), True
        if not attempt:
            self.end_iteration()
        return attempt

    def begin(
        self, components: Components, limits: Mapping[str, float] = MappingProxyType({})
    ) -> ComponentPass:
        """A pass with the scales that follow from what is known now.

        Args:
            components: the components.
            limits: the largest magnitude of each, by name, where they are not stored alike.
        """
        self._limits, self._single = limits, components.single
        scales = [self.scale(name) for name in components.names]
        silent: Dict[str, int] = {}
        if None in scales:
            before = () if self._searching else self._windows
            zeros = {**dict.fromkeys(before, 1), **self._zeros}
            unknown = [name for name, scale in zip(components.names, scales) if scale is None]
            silent = {name: zeros[name] for name in unknown if name in zeros}
        return ComponentPass(components, scales, silent, self._tried, limited=self.limited)

    @property
    def limited(self) -> bool:
        """Whether an overflow holds scales down that a finite pass over the same batch may raise again."""
        return bool(self._assumed)

    def has_measured(self, components: Components) -> bool:
        """Whether anything is known of the graph that these components are of."""
        measured = self._windows.keys() | self._partial.keys() | self._seen.keys()
        return not measured.isdisjoint(components.names)

    def learn(self, components: Components, measured: ComponentPass, *, chosen: bool, last: bool) -> None:
        """Take over what a pass has measured.

        Args:
            components: the components of the graph.
            measured: what the pass has measured of them.
            chosen: whether the pass chose its scales as it ran, and measured everything.
            last: whether everything was measured now that makes an entry of the windows.
        """
        self._measured_all |= last
        seen, unknown = self._seen, measured.unknown
        for index, (name, magnitude) in enumerate(zip(components.names, measured.magnitudes)):
            if magnitude is None:
                continue
            if name not in seen or magnitude > seen[name]:
                seen[name] = magnitude
            if not unknown[index]:
                continue
            if chosen and not magnitude:
                tries = measured.silent[index]
                self._zeros[name] = tries + 1
                # What a program has no gradient for is looked for once.
                if not tries:
                    self.settled = False
                elif tries < _SEARCHES and (index in measured.searched or measured.fed(index)):
                    self.settled = False
                    self._tried[name] = measured.scales[index] or 0.0
            if magnitude:
                used, wanted = measured.scales[index], self.scale(name)
                if used is not None and wanted is not None and wanted > used * self.policy.margin:
                    self.settled = False

    def after_overflow(self, measured: ComponentPass) -> bool:
        """Lower the component that overflowed in a pass, and all behind it; False when none did, or it cannot
        go lower.

        A pass that overflows says nothing about what is behind: gradients have mostly grown there, too, and
        each component would overflow in turn. What is assumed of them holds until a finite pass over the same
        batch, or, where the batch is lost, as an entry of the windows.
        """
        names, used, first = measured.graph.names, measured.scales, measured.overflowed
        scale = None if first is None else used[first]
        if first is None or scale is None:
            return False
        name = names[first]
        self._seen[name] = max(self._seen.get(name, 0.0), self.u_max(name) / scale)
        for index in set().union(*map(measured.graph.behind, (first, *measured.suspected))):
            other, own = names[index], used[index]
            present = scale if index == first else self.scale(other)
            # What nothing is known of follows from what is before it.
            if present is not None:
                lower = self.policy.after_overflow(min(present, own or present))
                self._assumed[other] = self.policy.assumed(lower, u_max=self.u_max(other))
        return not self.policy.at_floor(scale)

    def lose_batch(self) -> None:
        """Remember what was assumed since an overflow: no pass over this batch will show what is so."""
        seen = self._seen
        self._seen = {**seen, **{n: max(amax, seen.get(n, 0.0)) for n, amax in self._assumed.items()}}
        self._assumed = {}

    def keep_batch(self) -> None:
        """Forget what was assumed since an overflow: a finite pass over the same batch has measured it."""
        self._assumed = {}

    def search(self, names: Sequence[str]) -> None:
        """Have the batch run again with scales of its own, if these components have had gradients before:
        those of the batch are far smaller, or underflow to zero.
        """
        known = ((self._windows.get(name, _EMPTY).amax, self._partial.get(name)) for name in names)
        if self._searching or not any(map(any, known)):
            return
        if self._searches.left_out:
            self._searches = self._searches._replace(left_out=self._searches.left_out - 1)
            return
        self._searching, self.settled = True, False
        self._seen = {}

    def _end_search(self) -> None:
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
        seen, assumed = self._seen, self._assumed
        own = float(self._measured_all), float(self._searching)
        return [*own, *(max(seen.get(name, -1.0), assumed.get(name, -1.0)) for name in names)]

    @staticmethod
    def numbers_shared(names: Sequence[str]) -> int:
        """How many numbers `shared` returns."""
        return 2 + len(names)

    def adopt(self, names: Sequence[str], largest: Sequence[float]) -> None:
        """Take the largest that all ranks have `shared` for what this one has."""
        self._measured_all, self._searching = bool(largest[0]), bool(largest[1])
        self._seen = {name: magnitude for name, magnitude in zip(names, largest[2:]) if magnitude >= 0.0}
        self._assumed = {}

    def end_iteration(self) -> None:
        """What this iteration has seen becomes an entry of the windows, or a part of one."""
        if self._assumed:
            self.lose_batch()
        if self._searching:
            self._end_search()
        if self._seen or self._measured_all:
            windows, partial, length = self._windows, {**self._partial}, self.policy.window
            for name, magnitude in self._seen.items():
                if name not in partial or magnitude > partial[name]:
                    partial[name] = magnitude
            if self._measured_all:
                pushed = {n: windows.get(n, _EMPTY).push(amax, length) for n, amax in partial.items()}
                windows, partial = {**windows, **pushed}, {}
            self._windows, self._partial = windows, partial
        self.drop_iteration()

    def drop_iteration(self) -> None:
        """Forget what this iteration has seen, as if it had not been."""
        self._seen, self._assumed, self._measured_all, self._searching = {}, {}, False, False
        self._zeros, self._tried = {}, {}

    @property
    def searching(self) -> bool:
        """Whether this iteration has scales of its own: see `search`."""
        return self._searching

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

    def load(self, measured: Measured) -> None:
        """Take over what `measured_of` found in a state."""
        self.drop_iteration()
        self._windows, self._partial = dict(measured.windows), dict(measured.partial)
        self._searches = measured.searches
        self.began = -1, 0


class Measured(NamedTuple):
    """What `ComponentScales.state_dict` wrote.

    Attributes:
        windows: by name of the component.
        partial: what was measured since their last entry.
        searches: what came of searches.
    """

    windows: Mapping[str, AmaxWindow]
    partial: Mapping[str, float]
    searches: Searches = Searches()


def measured_of(state: Mapping[str, Any]) -> Measured:
    """What `ComponentScales.state_dict` wrote; KeyError, TypeError or ValueError when that cannot be."""
    windows = {str(name): AmaxWindow.from_list(values) for name, values in state["windows"].items()}
    partial = {str(name): number("partial", value) for name, value in state["partial"].items()}
    searches = Searches(*(integer("searches", value) for value in state.get("searches", ())))
    return Measured(windows, partial, searches)
