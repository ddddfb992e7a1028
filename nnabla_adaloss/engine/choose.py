# SPDX-License-Identifier: Apache-2.0
"""The algorithm: one scale for each component of the gradients, chosen before every backward pass.

A component is what functions connect that only pass a scale on. Layers, which multiply by a weight, lead from
one component to the next; so do functions of one element at the loss, and functions whose gradient is not
linear. In backward order, with S the scale that the gradients of a component carry:

    S(root) = the end of the range     the loss gradient is 1; S0 where it is given, or nothing is known
    S(c)    = min(room(c), S(before) * wish)                      the first way that leads to c decides
    S(c)    = S(before) * wish, or S(before) without a wish       where nothing was measured
    S(c)    = lowered, until alpha * max|W| stays in range for every layer that leads to c
    alpha   = S(c) / S(before)         of a layer: a power of two

    room(c) = the largest power of two with which what was measured stays a margin below the end of the range
    wish    = what a method would multiply the layer's input gradient by; none with "amax_history"
    level   : the rooms of components that follow each other, at most two bits apart, count as the smallest

A given S0 governs the components before any layer: each has the scale of the one before, lifted where a small
loss weight or a mean shrinks the gradient. Everything here is pure.
"""

from __future__ import annotations

import math
from typing import Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ..core.layer_record import Reason
from ..core.loss_section import loss_section_factor
from ..core.power_of_two import floor_power_of_two
from ..core.scale_history import levelled
from ..graph.components import Components, Edge

# How much larger a scale gets where all was zero with the last one: what was flushed to zero then, cannot
# overflow now in float16. And the largest scale that is tried: float32 holds its reciprocal.
_SEARCH_STEP, _LARGEST = 2.0**24, 2.0**100

Wish = Callable[[str, float, float], Tuple[float, Reason]]
"""What a method would multiply the input gradient of a layer by, and what held that where it is; given the
layer, S, and S without what makes up for a small loss.
"""


class Room(NamedTuple):
    """What is known of each component, by index."""

    room: Sequence[Optional[float]]  # None: nothing was measured, or nothing but zeros
    ceiling: Sequence[float]  # what an overflow of this batch has left; infinity: there was none
    tried: Sequence[Optional[float]]  # with what scale all was zero in the last pass over this batch
    level: bool = True  # whether components that follow each other may share a scale

    def of_root(self, base: float) -> float:
        """The scale of a loss gradient that is measured as any other."""
        own = self.room[0]
        return min(_of_unknown(base, self.tried[0]) if own is None else own, self.ceiling[0])


class Start(NamedTuple):
    """What a pass starts with."""

    scale: float  # of the loss gradient
    base: float  # what it would be with a loss that is not small: `accum_upper_bound` counts from there
    fixed: bool = False  # whether `scale` is a given S0
    amax: Sequence[Optional[float]] = ()  # with S0: the largest gradient of each component
    u_max: float = math.inf  # with S0: the largest magnitude of the storage format


class Choice(NamedTuple):
    """The scales of a pass."""

    scales: List[float]  # by component
    reasons: Dict[str, Reason]  # by layer: what held its alpha where it is


def choose(
    components: Components,
    known: Room,
    start: Start,
    wish: Optional[Wish],
    weight_room: Mapping[int, float],
    *,
    power_of_two: bool = True,
) -> Choice:
    """The scale of each component; `weight_room` has the largest alpha with which the scaled copy of a weight
    stays in range, by position of the weight.
    """
    room = _levelled(components, known)
    found: List[Optional[float]] = [None] * len(room)
    found[components.root] = start.scale
    reasons: Dict[str, Reason] = {}
    alive = {components.root}
    # What layers have made of the scale, by component: the product of their alphas.
    by_layers = [1.0] * len(room)
    for edge in components.edges:
        before, own, layer = found[edge.before], room[edge.after], edge.layer
        assert before is not None, "backward visits a function after all that read its output"
        if start.fixed and edge.after in components.governed:
            scale, reason = before * _lift(components, edge, before, start), Reason.METHOD
        else:
            wanted, reason = math.inf, Reason.ROOM
            if layer is None and start.fixed and wish is not None:
                wanted = _lift(components, edge, before, start)
            if layer is not None and wish is not None:
                wanted, reason = wish(layer, before, min(before, start.base * by_layers[edge.before]))
            scale = before * wanted if own is None or before * wanted < own else own
            if scale == own:
                reason = Reason.ROOM if own == known.room[edge.after] else Reason.LEVEL
            if own is None:
                scale = _of_unknown(scale if scale < math.inf else before, known.tried[edge.after])
            scale = min(scale, known.ceiling[edge.after])
            scale = before * floor_power_of_two(scale / before) if power_of_two else scale
        # Of ways to a component of which nothing was measured, the first counts that brings gradients.
        brings = edge.before in alive
        if found[edge.after] is None or (own is None and brings and edge.after not in alive):
            found[edge.after] = scale
            by_layers[edge.after] = by_layers[edge.before] * (1.0 if layer is None else scale / before)
        elif scale != found[edge.after]:
            reason = Reason.BRANCHES
        # A scalar that is zero is absent from the batch; of several elements all may have underflowed.
        if own is not None or (brings and components.names[edge.after] not in components.single):
            alive.add(edge.after)
        if layer is not None:
            reasons[layer] = reason
    # A component that nothing leads to gets no gradient.
    scales = [start.scale if scale is None else scale for scale in found]
    _lower_for_weights(components, scales, weight_room, reasons)
    return Choice(scales, reasons)


def _levelled(components: Components, known: Room) -> Sequence[Optional[float]]:
    """The rooms, levelled; what is multiplied at single elements costs nothing, so these keep theirs."""
    room = list(known.room)
    if known.level:
        many = [
            (index, scale)
            for index, scale in enumerate(room)
            if scale is not None and components.names[index] not in components.single
        ]
        for (index, _), scale in zip(many, levelled([scale for _, scale in many])):
            room[index] = scale
    return room


def _of_unknown(arriving: float, tried: Optional[float]) -> float:
    """The scale of a component of which nothing is known but that all was zero with the scale `tried`."""
    return min(arriving if tried is None or arriving > tried else tried * _SEARCH_STEP, _LARGEST)


def _lift(components: Components, edge: Edge, before: float, start: Start) -> float:
    """How far a gradient is raised where it leaves a function at the loss, with a given S0."""
    amax, after = start.amax[edge.before], start.amax[edge.after]
    several = components.loss_exits > 1
    factor = loss_section_factor(
        (amax or 0.0) * before,
        1,
        before,
        start.base,
        expands=edge.expands,
        u_max=start.u_max,
        several=several,
    )
    if not edge.expands:
        return factor
    stored = (after or 0.0) * before * factor
    return factor * loss_section_factor(
        stored, 2, before * factor, start.base, expands=True, u_max=start.u_max
    )


def _lower_for_weights(
    components: Components, scales: List[float], room: Mapping[int, float], reasons: Dict[str, Reason]
) -> None:
    """Lower scales until the scaled copy of every weight stays in range. They only fall, so that it ends."""
    limited = [edge for edge in components.edges if edge.layer is not None and edge.factor in room]
    lowered = True
    while lowered:
        lowered = False
        for edge in limited:
            highest = scales[edge.before] * room[edge.factor]
            if scales[edge.after] > highest:
                scales[edge.after], lowered = highest, True
                reasons[edge.layer or ""] = Reason.WEIGHT_RANGE
