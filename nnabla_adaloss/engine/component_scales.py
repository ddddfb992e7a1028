# SPDX-License-Identifier: Apache-2.0
"""What was measured of a network's components, and the scales that follow from it."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Dict, FrozenSet, Iterable, Iterator, List, Mapping, Optional, Sequence, Set, Tuple

from ..core.scale_history import AmaxWindow, HistoryPolicy, levelled
from ..core.validation import number
from ..graph.components import Components
from ..graph.structure import GraphStructure
from .leaf_gradients import LeafSeen

SEARCH_STEP = 2.0**24
"""How much larger a scale gets where all was zero with the last one: what was flushed then, cannot overflow
now in float16.
"""

_SEARCHES = 5

_EMPTY = AmaxWindow()


class ComponentPass:
    """The scales of the components in one backward pass, and what it measures of them.

    Args:
        components: the components.
        scales: the scale of each; None where nothing is known yet.
        silent: in how many passes each has shown nothing but zeros, by name.
        limited: whether one was lowered after an overflow.

    Attributes:
        graph: the components.
        of: component of each variable, by position.
        producers: component of a function's output, by number of the function.
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
        *,
        limited: bool = False,
    ) -> None:
        self.graph = components
        self.of, self.producers = components.of, components.producers
        self.scales = list(scales)
        self.magnitudes: List[Optional[float]] = [None] * len(self.scales)
        self.unknown = [scale is None for scale in scales]
        self.silent = [silent.get(name, 0) for name in components.names] if silent else [0] * len(self.scales)
        self.searched: Set[int] = set()
        self.overflowed: Optional[int] = None
        self._limited = limited

    def level(self) -> None:
        """Give components that follow each other one scale, where that is hardly less than their own.

        Those of single elements keep theirs: what is multiplied there costs nothing. So do all after an
        overflow: nobody knows how large gradients have become, and each goes as low as it has to.
        """
        if self._limited:
            return
        single, names = self.graph.single, self.graph.names
        many = [
            (i, scale) for i, scale in enumerate(self.scales) if scale is not None and names[i] not in single
        ]
        for (index, _), scale in zip(many, levelled([scale for _, scale in many])):
            self.scales[index] = scale

    @property
    def complete(self) -> bool:
        """Whether the scales of all components in which there was anything were known before."""
        return not any(unknown and magnitude for unknown, magnitude in zip(self.unknown, self.magnitudes))

    def measure_gradients(self, found: Iterable[Tuple[int, float, float]]) -> None:
        """Take note of gradients: position, magnitude as stored, and the scale that it carries."""
        self.measure(self._by_component(found))

    def _by_component(self, found: Iterable[Tuple[int, float, float]]) -> Iterator[Tuple[int, float, float]]:
        of, handed_over = self.of, self.graph.handed_over
        for position, stored, scale in found:
            component = of.get(position)
            if component is None:
                continue
            if position in handed_over:
                # It does not carry its component's scale any more.
                own = self.scales[component] or scale
                stored, scale = stored * (own / scale), own
            yield component, stored, scale

    def of_leaf(self, structure: GraphStructure, leaf: int, number: int) -> int:
        """The component that the gradient of a leaf belongs to, which the function `number` writes."""
        if leaf in self.of and any(slot.target == leaf for slot in structure.by_number[number].slots):
            return self.of[leaf]
        return self.producers[number]

    def measure_leaves(self, structure: GraphStructure, seen: Iterable[LeafSeen]) -> None:
        """Take note of gradients of leaves, but for those that were not finite."""
        self.measure(
            (self.of_leaf(structure, leaf, function), largest * scale, scale)
            for leaf, function, largest, scale in seen
            if largest < math.inf
        )

    def measure(self, found: Iterable[Tuple[int, float, float]]) -> None:
        """Take note of what was seen: component, magnitude as stored, and the scale that it carries."""
        scales, magnitudes = self.scales, self.magnitudes
        for component, stored, scale in found:
            own = scales[component]
            if own is None:
                own = scales[component] = scale
            magnitude = stored / own
            known = magnitudes[component]
            if known is None or magnitude > known:
                magnitudes[component] = magnitude


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

    undone = "_windows", "_partial", "began"

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
        window = self._windows.get(name)
        amax = 0.0 if window is None else window.amax
        for since in (self._partial, self._seen):
            if name in since and since[name] > amax:
                amax = since[name]
        ceiling = self._ceilings.get(name)
        if amax == 0.0:
            return ceiling
        scale = self.policy.scale(amax, u_max=self.u_max(name))
        return scale if ceiling is None or scale < ceiling else ceiling

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
            zeros = {**dict.fromkeys(self._windows, 1), **self._zeros}
            unknown = [name for name, scale in zip(components.names, scales) if scale is None]
            silent = {name: zeros[name] for name in unknown if name in zeros}
        return ComponentPass(components, scales, silent, limited=self.limited)

    @property
    def limited(self) -> bool:
        """Whether an overflow of this iteration holds a scale down, which is no matter of the next one."""
        return bool(self._ceilings)

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
                # What a program has no gradient for is looked for once; a loss section can raise it further.
                if not tries or (index in measured.searched and self._zeros[name] <= _SEARCHES):
                    self.settled = False
            if magnitude:
                used, wanted = measured.scales[index], self.scale(name)
                if used is not None and wanted is not None and wanted > used * self.policy.margin:
                    self.settled = False

    def after_overflow(self, measured: ComponentPass) -> bool:
        """Lower the component that overflowed in a pass; False when none did, or it cannot go lower.

        The first time in an iteration that one alone. When that was not enough, gradients have grown on the
        whole way behind it, and all components there are lowered with it: else each would overflow in turn.
        """
        names, used, first = measured.graph.names, measured.scales, measured.overflowed
        scale = None if first is None else used[first]
        if first is None or scale is None:
            return False
        again, name = bool(self._ceilings), names[first]
        self._seen[name] = max(self._seen.get(name, 0.0), self.u_max(name) / scale)
        self._ceilings[name] = self.policy.after_overflow(scale)
        for other, own in zip(names[first + 1 :], used[first + 1 :]) if again else ():
            present = self.scale(other)
            if present is not None:
                self._ceilings[other] = self.policy.after_overflow(min(present, own or present))
        return not self.policy.at_floor(scale)

    def shared(self, names: Sequence[str]) -> List[float]:
        """For other ranks: whether this iteration ends an entry of the windows, and the largest magnitude of
        each component in it; -1 where none.
        """
        return [float(self._measured_all), *(self._seen.get(name, -1.0) for name in names)]

    def adopt(self, names: Sequence[str], largest: Sequence[float]) -> None:
        """Take the largest that all ranks have `shared` for what this one has."""
        self._measured_all = bool(largest[0])
        self._seen = {name: magnitude for name, magnitude in zip(names, largest[1:]) if magnitude >= 0.0}

    def end_iteration(self) -> None:
        """What this iteration has seen becomes an entry of the windows, or a part of one."""
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
        self._seen, self._ceilings, self._zeros, self._measured_all = {}, {}, {}, False

    def amaxes(self) -> Dict[str, float]:
        """The largest magnitude in the window of each component, by name."""
        return {name: window.amax for name, window in self._windows.items()}

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

    def load(self, measured: Measured) -> None:
        """Take over what `measured_of` found in a state."""
        self.drop_iteration()
        self._windows, self._partial = dict(measured[0]), dict(measured[1])
        self.began = -1, 0


Measured = Tuple[Mapping[str, AmaxWindow], Mapping[str, float]]
"""Windows by name of the component, and what was measured since their last entry."""


def measured_of(state: Mapping[str, Any]) -> Measured:
    """What `ComponentScales.state_dict` wrote; KeyError, TypeError or ValueError when that cannot be."""
    windows = {str(name): AmaxWindow.from_list(values) for name, values in state["windows"].items()}
    return windows, {str(name): number("partial", value) for name, value in state["partial"].items()}
