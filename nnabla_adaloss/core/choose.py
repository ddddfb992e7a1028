# SPDX-License-Identifier: Apache-2.0
"""The algorithm: one scale for each component of the gradients, chosen before every backward pass.

A component is what functions connect that only pass a scale on. Edges lead from one component to the next:
layers, which multiply by a weight, functions of one element at the loss, and functions whose gradient is not
linear. In backward order, with S the scale that the gradients of a component carry:

    S(root) = the end of the range     the loss gradient is 1; S0 where it is given, or nothing is known
    S(c)    = min(room(c), S(before) * alpha_m)                   the first edge that leads to c decides
    S(c)    = S(before) * alpha_m * weight(before) / weight(c)    where nothing was measured, behind a layer
    S(c)    = start scale / (gain(before) * weight(c))            where nothing was measured, at the loss;
                                                                  if that has shown zeros, divided by u_min
    S(c)    = lowered, until alpha * max|W| stays in range for every layer that leads to c
    alpha   = S(c) / S(before)         of a layer: a power of two

    weight(c) = the loss weight of a component, as it is read from the graph before the pass
    gain(c)   = the largest gradient of c that is remembered, divided by the loss weight of its batch; 1 where
                none is
    room(c)   = the largest power of two with S * gain(c) * weight(c) <= u_max / margin
    alpha_m   = the alpha that the loss scale method gives the layer; "amax_history" gives none
    level     : the rooms of components that follow each other, at most two bits apart, count as the smallest;
                so do those behind several losses, at most four bits apart
    joined    : components that only hooks could part are one, with the smallest of their rooms, unless the
                gradient of a leaf would underflow
    absent    : with a loss weight of 0, c limits nothing, and takes the scale of what is behind it, so that
                its layers have alpha 1

A given S0 decides about the components before any layer: each has the scale of the one before, lifted where a
small loss weight or a mean shrinks the gradient. Everything here is pure.
"""

from __future__ import annotations

import math
from functools import partial
from typing import AbstractSet, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from .components import Components, Edge, Joined
from .layer_record import Reason
from .loss_section import loss_section_factor
from .power_of_two import floor_power_of_two
from .scale_history import levelled

# The largest scale: float32 holds its reciprocal, too.
_LARGEST = 2.0**100

# How much larger a gradient must be with a scale of its own, for hooks to be worth it.
_WORTH_HOOKS = 2.0**6

# Scales of several losses within this factor of each other are replaced by the smallest of them.
_LOSSES_APART = 16.0

MethodAlpha = Callable[[str, float, float], Tuple[float, Reason]]
"""The alpha that a method gives a layer, and what limits it; given the layer, S, and S without what makes up
for a small loss.
"""


class Known(NamedTuple):
    """What is known of each component, by index."""

    room: Sequence[Optional[float]]  # None: nothing was measured, or nothing but zeros
    assumed: Mapping[int, float]  # the room that assumed gains leave, after an overflow
    loss_weights: Tuple[float, ...]  # 0: absent from this batch
    gains: Sequence[Optional[float]]  # None: nothing was measured
    underflowed: AbstractSet[int] = frozenset()  # all zeros so far, unlike what they follow from
    level: bool = True  # whether components that follow each other may share a scale

    def first(self, index: int, start: float, before: float, u_min: float) -> float:
        """The scale of a component that was not measured yet: `start`, divided by its loss weight. One that
        underflowed is measured once more, with the largest scale at which nothing can be larger than 1.
        """
        scale = start / (self.loss_weights[index] or 1.0)
        if index in self.underflowed:
            scale = max(scale, min(scale, before) / u_min)
        return within_float32(scale)

    def joined(self, of: Sequence[int], count: int) -> Known:
        """What is known of `count` components, each of those that `of` maps to it."""
        room: List[Optional[float]] = [None] * count
        amax: List[Optional[float]] = [None] * count
        weight = [0.0] * count
        assumed: Dict[int, float] = {}
        for own, index in enumerate(of):
            scale, gain, largest = self.room[own], self.gains[own], amax[index]
            if scale is not None:
                room[index] = min(scale, room[index] or scale)
            if gain is not None:
                amax[index] = max(gain * self.loss_weights[own], largest or 0.0)
            weight[index] = max(weight[index], self.loss_weights[own])
            if own in self.assumed:
                assumed[index] = min(self.assumed[own], assumed.get(index, math.inf))
        gains = [None if a is None else a / (w or 1.0) for a, w in zip(amax, weight)]
        return Known(room, assumed, tuple(weight), gains, {of[own] for own in self.underflowed}, self.level)

    def of_root(self, base: float, u_min: float) -> float:
        """The scale of a loss gradient that is measured as any other."""
        own = self.first(0, base, math.inf, u_min) if self.room[0] is None else self.room[0]
        return min(own, self.assumed.get(0, math.inf))


class Start(NamedTuple):
    """What a pass starts with."""

    root_scale: float  # of the loss gradient
    start_scale: float  # that of a loss which is not small: `accum_upper_bound` counts from there
    u_min: float  # the smallest magnitude of the storage format
    fixed: bool = False  # whether `root_scale` is a given S0
    amax: Sequence[Optional[float]] = ()  # with S0: the largest gradient of each component
    u_max: float = math.inf  # with S0: the largest magnitude of the storage format


class Choice(NamedTuple):
    """The scales of a pass."""

    scales: List[float]  # by component
    reasons: Dict[str, Reason]  # by layer, for its alpha


def choose(
    components: Components,
    known: Known,
    start: Start,
    method_alpha: Optional[MethodAlpha],
    max_alpha: Mapping[int, float],
    *,
    power_of_two: bool = True,
) -> Choice:
    """The scale of each component; `max_alpha` has the largest alpha with which the scaled copy of a weight
    stays in range, by position of the weight.
    """
    room = _levelled(components, known)
    found: List[Optional[float]] = [None] * len(room)
    found[components.root] = start.root_scale
    reasons: Dict[str, Reason] = {}
    # Those in which gradients arrive that are not zero.
    nonzero = {components.root}
    # What layers have made of the scale, by component: the product of their alphas.
    by_layers = [1.0] * len(room)
    for edge in _in_order(components, known.loss_weights):
        before, own, layer = found[edge.before], room[edge.after], edge.layer
        assert before is not None, "it comes after an edge that leads to it"
        if start.fixed and edge.after in components.before_layers:
            scale, reason = within_float32(before * _lift(components, edge, before, start)), Reason.METHOD
        else:
            wanted, reason = math.inf, Reason.ROOM
            if layer is None and start.fixed and method_alpha is not None:
                wanted = _lift(components, edge, before, start)
            if layer is not None and method_alpha is not None:
                wanted, reason = method_alpha(
                    layer, before, min(before, start.start_scale * by_layers[edge.before])
                )
            scale = before * wanted if own is None or before * wanted < own else own
            if scale == own:
                reason = Reason.ROOM if own == known.room[edge.after] else Reason.LEVEL
            at_loss = layer is None or edge.before in components.single
            if own is None and at_loss and not start.fixed:
                gain = known.gains[edge.before] or 1.0
                scale = known.first(edge.after, start.start_scale / gain, before, start.u_min)
            elif own is None:
                scale = scale if scale < math.inf else before
                if layer is not None:
                    # Along another edge more may arrive.
                    scale *= known.loss_weights[edge.before] / known.loss_weights[edge.after]
            scale = min(scale, known.assumed.get(edge.after, math.inf))
            scale = before * floor_power_of_two(scale / before) if power_of_two else scale
        # Several edges may lead to a component that was never measured: the first along which gradients
        # arrive decides its scale.
        arrives = edge.before in nonzero
        if found[edge.after] is None or (own is None and arrives and edge.after not in nonzero):
            found[edge.after] = scale
            by_layers[edge.after] = by_layers[edge.before] * (1.0 if layer is None else scale / before)
        elif scale != found[edge.after]:
            reason = Reason.BRANCHES
        # A scalar that is zero is absent from the batch; of several elements all may have underflowed.
        if own is not None or (arrives and edge.after not in components.single):
            nonzero.add(edge.after)
        if layer is not None:
            reasons[layer] = reason
    # A component that nothing leads to gets no gradient.
    scales = [start.root_scale if scale is None else scale for scale in found]
    _lower_for_weights(components, scales, known.loss_weights, max_alpha, reasons)
    _set_absent(components, scales, known.loss_weights, start.root_scale)
    return Choice(scales, reasons)


def choose_together(
    components: Components,
    joined: Joined,
    known: Known,
    choice_of: Callable[[Components, Known], Choice],
    spread: float,
) -> Optional[Choice]:
    """One scale for all components that only hooks could part; None if the gradient of a leaf would
    underflow: if its largest contributions come through a component that this scale puts more than `spread`
    below its room, and that is clearly larger with a scale of its own.
    """
    choice = choice_of(joined.components, known.joined(joined.of, len(joined.components.names)))
    choice = choice._replace(scales=[choice.scales[index] for index in joined.of])
    low = {i for i, room in enumerate(known.room) if room is not None and room > spread * choice.scales[i]}
    if not low:
        return choice
    apart = choice_of(components, known).scales
    far = {i for i in low if apart[i] > _WORTH_HOOKS * choice.scales[i]}
    underflow = set().union(*map(components.behind, far))
    for writers in components.leaves.values():
        rooms = {room: index for index in writers for room in [known.room[index]] if room is not None}
        if rooms and rooms[min(rooms)] in underflow:
            return None
    return choice


def _in_order(components: Components, loss_weights: Sequence[float]) -> Iterator[Edge]:
    """The edges between components that are not absent, each after one that leads to where it begins: the
    first one to a trunk may come from a head that is absent.
    """
    reached = {components.root}
    waiting = [edge for edge in components.edges if loss_weights[edge.before] and loss_weights[edge.after]]
    while waiting:
        later = []
        for edge in waiting:
            if edge.before in reached:
                reached.add(edge.after)
                yield edge
            else:
                later.append(edge)
        waiting = later if len(later) < len(waiting) else []


def _levelled(components: Components, known: Known) -> Sequence[Optional[float]]:
    """Rooms that are close become equal, as each change of scale costs a copied weight. Single elements keep
    their own: to multiply one is free. Several losses are levelled, too: each would be multiplied by itself.
    """
    room = list(known.room)
    if known.level:
        single = components.single
        ends = {e.after for e in components.edges if e.layer is None and e.before in single}
        at_loss = [i for i in ends - single if room[i] is not None]
        smallest = min([room[i] or 0.0 for i in at_loss], default=0.0)
        for index in at_loss:
            if (room[index] or 0.0) <= _LOSSES_APART * smallest:
                room[index] = smallest
        many = [(i, scale) for i, scale in enumerate(room) if scale is not None and i not in single]
        for (index, _), scale in zip(many, levelled([scale for _, scale in many])):
            room[index] = scale
    return room


def within_float32(scale: float) -> float:
    """`scale`, or the nearest one that float32 can multiply and divide by."""
    return min(max(scale, 1.0 / _LARGEST), _LARGEST)


def _lift(components: Components, edge: Edge, before: float, start: Start) -> float:
    """How far a gradient is lifted where it leaves a function at the loss, with a given S0."""
    own, behind = start.amax[edge.before] or 0.0, start.amax[edge.after] or 0.0
    several = components.loss_exits > 1
    factor = partial(
        loss_section_factor,
        start_scale=start.start_scale,
        expands=edge.expands,
        u_max=start.u_max,
        several=several,
    )
    lift = factor(own * before, 1, before)
    if edge.expands:
        lift *= factor(behind * before * lift, 2, before * lift)
    return lift


def _set_absent(
    components: Components, scales: List[float], loss_weights: Sequence[float], start: float
) -> None:
    """Give components that have no gradient in a batch the largest scale of those behind them; `start` where
    these are absent, too.
    """
    edges = [edge for edge in reversed(components.edges) if not loss_weights[edge.before]]
    for edge in edges:
        scales[edge.before] = 0.0
    # They only rise, and to what others have, so that it ends.
    risen = True
    while risen:
        risen = False
        for edge in edges:
            if scales[edge.after] > scales[edge.before]:
                scales[edge.before], risen = scales[edge.after], True
    for edge in edges:
        scales[edge.before] = scales[edge.before] or start


def _lower_for_weights(
    components: Components,
    scales: List[float],
    loss_weights: Sequence[float],
    max_alpha: Mapping[int, float],
    reasons: Dict[str, Reason],
) -> None:
    """Lower scales until the scaled copy of every weight stays in range. They only fall, so that it ends."""
    edges = [edge for edge in components.edges if edge.factor in max_alpha and loss_weights[edge.before]]
    lowered = True
    while lowered:
        lowered = False
        for edge in edges:
            highest = scales[edge.before] * max_alpha[edge.factor]
            if scales[edge.after] > highest:
                scales[edge.after], lowered = highest, True
                reasons[edge.layer or ""] = Reason.WEIGHT_RANGE
