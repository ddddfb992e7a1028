# SPDX-License-Identifier: Apache-2.0
"""The scales of a network's components in one backward pass, and what it measures of them."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import AbstractSet, Iterable, Iterator, List, Mapping, Optional, Sequence, Set, Tuple

from ..core.power_of_two import clamp_scale
from ..core.scale_history import levelled
from ..graph.components import Components
from ..graph.structure import GraphStructure
from .leaf_gradients import LeafSeen

SEARCH_STEP = 2.0**24
"""How much larger a scale gets where all was zero with the last one: what was flushed then, cannot overflow
now in float16.
"""


class ComponentPass:
    """The scales of the components in one backward pass, and what it measures of them.

    Args:
        components: the components.
        scales: the scale of each; None where nothing is known yet.
        silent: in how many passes each has shown nothing but zeros, by name.
        tried: with which scale, in the last pass over the same batch, by name.
        limited: whether one was lowered after an overflow.

    Attributes:
        graph: the components.
        of: component of each variable, by position.
        producers: component of a function's output, by number of the function.
        scales: the scale that each component has in this pass; None until something has reached it.
        room: the largest scale that what was measured leaves room for; None where nothing was.
        magnitudes: the largest magnitude seen in each, as stored, divided by its scale; None where none was.
        unknown: whether nothing was known of a component when the pass began.
        silent: in how many passes all that was measured of it was zeros: a larger scale may show more.
        searched: components that got a larger scale for that.
        overflowed: the first component, in backward order, that was not finite; None: all were.
        suspected: components before it of which nothing was seen: one of them may have overflowed first.
    """

    def __init__(
        self,
        components: Components,
        scales: Sequence[Optional[float]],
        silent: Mapping[str, int] = MappingProxyType({}),
        tried: Mapping[str, float] = MappingProxyType({}),
        *,
        limited: bool = False,
    ) -> None:
        self.graph = components
        self.of, self.producers = components.of, components.producers
        self.scales, self.room = list(scales), scales
        self.magnitudes: List[Optional[float]] = [None] * len(self.scales)
        self.unknown = [scale is None for scale in scales]
        self.silent = [silent.get(name, 0) for name in components.names] if silent else [0] * len(self.scales)
        self._tried = tried
        self.searched: Set[int] = set()
        self.overflowed: Optional[int] = None
        self.suspected: AbstractSet[int] = frozenset()
        self._limited = limited

    def sought(self, index: int) -> Optional[float]:
        """The scale for a component that a pass over the same batch has shown to be zero: what arrives there,
        if that is more than it had then; else far more. None: there was no such pass.
        """
        before = self._tried.get(self.graph.names[index])
        if before is None:
            return None
        arriving = [
            self.scales[i] or 0.0 for i, following in enumerate(self.graph.next) if index in following
        ]
        largest = max(arriving, default=0.0)
        return largest if largest > before else clamp_scale(before * SEARCH_STEP)

    def fed(self, index: int) -> bool:
        """Whether gradients of several elements, not all zero, were turned into those of a component."""
        names, single, before = self.graph.names, self.graph.single, zip(self.magnitudes, self.graph.next)
        return any(
            amax and index in following and names[i] not in single
            for i, (amax, following) in enumerate(before)
        )

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
