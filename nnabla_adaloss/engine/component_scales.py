# SPDX-License-Identifier: Apache-2.0
"""What was measured of a network's components, and the scales that follow from it."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any, Dict, FrozenSet, List, Mapping, Optional, Sequence, Set, Tuple

from ..core.scale_history import AmaxWindow, HistoryPolicy
from ..graph.components import Components

SEARCH_STEP = 2.0**24
"""How much larger a scale gets where all was zero with the last one: what was flushed then, cannot overflow
now in float16.
"""

_SEARCHES = 5


class ComponentPass:
    """The scales of the components in one backward pass, and what it measures of them.

    Args:
        components: the components.
        scales: the scale of each; None where nothing is known yet.
        silent: in how many passes each has shown nothing but zeros, by name.

    Attributes:
        of: component of each variable, by key.
        producers: component of a function's output, by function key.
        scales: the scale that each component has in this pass; None until something has reached it.
        magnitudes: the largest magnitude seen in each, as stored, divided by its scale; None where none was.
        unknown: whether nothing was known of a component when the pass began.
        silent: in how many passes all that was measured of it was zeros: a larger scale may show more.
        searched: components that got a larger scale for that.
        overflowed: the first component, in backward order, that was not finite; None: all were.
    """

    def __init__(
        self,
        components: Components,
        scales: Sequence[Optional[float]],
        silent: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.of, self.producers, self._handed_over = (
            components.of,
            components.producers,
            components.handed_over,
        )
        self.scales = list(scales)
        self.magnitudes: List[Optional[float]] = [None] * len(self.scales)
        self.unknown = [scale is None for scale in scales]
        self.silent = [silent.get(name, 0) for name in components.names]
        self.searched: Set[int] = set()
        self.overflowed: Optional[int] = None

    @property
    def complete(self) -> bool:
        """Whether the scales of all components in which there was anything were known before."""
        return not any(unknown and magnitude for unknown, magnitude in zip(self.unknown, self.magnitudes))

    def measure_gradient(self, key: int, stored: float, scale: float) -> None:
        """Take note of the gradient `key` of magnitude `stored` that carries `scale`."""
        component = self.of.get(key)
        if component is None:
            return
        if key in self._handed_over:
            # It does not carry its component's scale any more.
            own = self.scales[component] or scale
            stored, scale = stored * (own / scale), own
        self.measure(component, stored, scale)

    def measure(self, component: int, stored: float, scale: float) -> None:
        """Take note of something in a component, of magnitude `stored`, that carries `scale`."""
        own = self.scales[component]
        if own is None:
            own = self.scales[component] = scale
        magnitude = stored / own
        known = self.magnitudes[component]
        if known is None or magnitude > known:
            self.magnitudes[component] = magnitude


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

    def __init__(self, policy: HistoryPolicy, u_max: float, u_max_single: Optional[float] = None) -> None:
        self.policy = policy
        self._u_max = u_max
        self._u_max_single = u_max if u_max_single is None else u_max_single
        self._single: FrozenSet[str] = frozenset()
        self._limits: Mapping[str, float] = MappingProxyType({})
        self._names: List[str] = []
        self.settled = True
        self.began: Tuple[int, int] = -1, 0
        self._windows: Dict[str, AmaxWindow] = {}
        # Of the present iteration: what was seen, and what an overflow has ruled out for the next tries.
        self._seen: Dict[str, float] = {}
        self._ceilings: Dict[str, float] = {}
        # In how many passes of it a component was nothing but zeros.
        self._zeros: Dict[str, int] = {}

    def u_max(self, name: str) -> float:
        """The largest magnitude that a gradient of a component can have."""
        return self._limits.get(name, self._u_max_single if name in self._single else self._u_max)

    def scale(self, name: str) -> Optional[float]:
        """The scale of a component; None while nothing is known of it."""
        amax = max(self._windows.get(name, AmaxWindow()).amax, self._seen.get(name, 0.0))
        ceiling = self._ceilings.get(name)
        if amax == 0.0:
            return ceiling
        scale = self.policy.scale(amax, u_max=self.u_max(name))
        return scale if ceiling is None or scale < ceiling else ceiling

    def begin_pass(self, iteration: int) -> int:
        """Count a pass of an iteration, and end the one before if this is another; return its number."""
        number = self.began[1] + 1 if self.began[0] == iteration else 0
        self.began = iteration, number
        if not number:
            self.end_iteration()
        return number

    def begin(
        self, components: Components, limits: Mapping[str, float] = MappingProxyType({})
    ) -> ComponentPass:
        """A pass with the scales that follow from what is known now.

        Args:
            components: the components.
            limits: the largest magnitude of each, by name, where they are not stored alike.
        """
        self._limits, self._single, self._names = limits, components.single, components.names
        scales = [self.scale(name) for name in components.names]
        zeros = {**dict.fromkeys(self._windows, 1), **self._zeros}
        silent = {n: zeros[n] for n, scale in zip(components.names, scales) if scale is None and n in zeros}
        return ComponentPass(components, scales, silent)

    def learn(self, components: Components, measured: ComponentPass) -> None:
        """Take over what a pass has measured."""
        self.settled = True
        for index, magnitude in enumerate(measured.magnitudes):
            if magnitude is None:
                continue
            name = components.names[index]
            self._seen[name] = max(self._seen.get(name, 0.0), magnitude)
            if not magnitude and measured.unknown[index]:
                tries = measured.silent[index]
                self._zeros[name] = tries + 1
                # What a program has no gradient for is looked for once; a loss section can raise it further.
                if not tries or (index in measured.searched and self._zeros[name] <= _SEARCHES):
                    self.settled = False
            if magnitude and measured.unknown[index]:
                used, wanted = measured.scales[index], self.scale(name)
                if used is not None and wanted is not None and wanted > used * self.policy.margin:
                    self.settled = False

    def after_overflow(self, name: str, scale: float) -> bool:
        """Lower a component that overflowed at `scale`; False when it cannot go lower.

        The first time in an iteration that one alone. When that was not enough, gradients have grown on the
        whole way behind it, and all components there are lowered with it: else each would overflow in turn.
        """
        again = bool(self._ceilings)
        self._seen[name] = max(self._seen.get(name, 0.0), self.u_max(name) / scale)
        self._ceilings[name] = self.policy.after_overflow(scale)
        behind = self._names[self._names.index(name) + 1 :] if again and name in self._names else []
        for other in behind:
            present = self.scale(other)
            if present is not None:
                self._ceilings[other] = self.policy.after_overflow(present)
        return not self.policy.at_floor(scale)

    def seen(self, names: Sequence[str]) -> List[float]:
        """The largest magnitude that this iteration has seen in each component; -1 where none."""
        return [self._seen.get(name, -1.0) for name in names]

    def adopt(self, names: Sequence[str], seen: Sequence[float]) -> None:
        """Take what all ranks have seen together for what this iteration has."""
        self._seen = {name: magnitude for name, magnitude in zip(names, seen) if magnitude >= 0.0}

    def end_iteration(self) -> None:
        """What this iteration has seen becomes an entry of the windows."""
        if not (self._seen or self._ceilings):
            return
        for name, magnitude in self._seen.items():
            self._windows[name] = self._windows.get(name, AmaxWindow()).push(magnitude, self.policy.window)
        self.drop_iteration()

    def drop_iteration(self) -> None:
        """Forget what this iteration has seen, as if it had not been."""
        self._seen, self._ceilings, self._zeros = {}, {}, {}

    def amaxes(self) -> Dict[str, float]:
        """The largest magnitude in the window of each component, by name."""
        return {name: window.amax for name, window in self._windows.items()}

    def restart(self, start_scale: float) -> None:
        """Forget everything, and start with another scale."""
        self.policy = replace(self.policy, start_scale=start_scale)
        self.forget()

    def forget(self) -> None:
        """Forget everything."""
        self._windows.clear()
        self.drop_iteration()

    def state_dict(self) -> Dict[str, Any]:
        """The windows as plain lists, by name of the component; with what this iteration has seen so far."""
        ended = {
            name: self._windows.get(name, AmaxWindow()).push(magnitude, self.policy.window)
            for name, magnitude in self._seen.items()
        }
        return {name: window.as_list() for name, window in {**self._windows, **ended}.items()}

    def load(self, windows: Mapping[str, AmaxWindow]) -> None:
        """Take over the windows that `windows_of` found in a state."""
        self.drop_iteration()
        self._windows, self.began = dict(windows), (-1, 0)


def windows_of(state: Mapping[str, Any]) -> Dict[str, AmaxWindow]:
    """The windows that `ComponentScales.state_dict` wrote; TypeError or ValueError when that cannot be."""
    return {str(name): AmaxWindow.from_list(values) for name, values in state.items()}
