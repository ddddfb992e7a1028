# SPDX-License-Identifier: Apache-2.0
"""The algorithm: one scale for each component of the gradients, chosen before every backward pass.

A component is a set of gradients that are connected by functions which only pass a scale on. Edges lead from
one component to the next: layers, which multiply by a weight, scalar functions at the loss, and functions
whose gradient is not linear. In backward order, with S the scale that the gradients of a component carry:

    S(root) = the end of the range, as the loss gradient is 1; S0 if given
    S(c)    = min(limit(c), S(before) * alpha_m)                  by the first edge that leads to c
    S(c)    = S(before) * alpha_m * size(before) / size           after a layer, if unmeasured
    S(c)    = start scale / (amax(before) * weight(c))            at the loss, if unmeasured;
                                                                  of zeros times u_max / (margin * u_min)
    S(c)    = lowered, until alpha * max|W| stays in range for every layer that leads to c
    S(before) = lowered to limit(before) / spare at most, until the copies alpha * W of the layers after it
                keep their bits; not at the root, nor at the loss with a given S0
    alpha   = S(c) / S(before)         of a layer: a power of two

    weight(c) = loss weight of a component, read from the graph before the pass
    amax(c)   = unit amax: largest remembered gradient of c, divided by its batch's loss weight; 1 if none
    size(c)   = amax(c) * weight(c); size: the largest of those before the layers that lead to a component
    limit(c)  = the largest power of two with S * amax(c) * weight(c) <= u_max / margin; with a given S0,
                at most S0 / weight(c) for components that no layer leads to: at the loss, no scale times its
                loss weight exceeds S0
    alpha_m   = the layer's alpha from the loss scale method; infinite for "amax_history"
    equalized : limits of components that follow each other, at most two bits apart, count as the smallest;
                so do those after several losses, at most four bits apart
    merged    : components that only hooks could split are one, with the smallest of their limits, unless
                the gradient of a leaf would underflow
    spare     : 2^12 for float16: gradients that far below their limit keep their bits, too; 2^20 where
                the copy would lose nearly all bits otherwise
    inactive  : with a loss weight of 0, c limits nothing, and takes the scale of its successor, so that its
                layers have alpha 1

All functions here are pure.
"""

from __future__ import annotations

import math
from typing import AbstractSet, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from .alpha_bounds import AlphaBounds
from .components import Components, Edge, MergedComponents
from .layer_record import Reason
from .power_of_two import floor_power_of_two
from .scale_history import equalized

# The largest scale: float32 holds its reciprocal, too.
_LARGEST = 2.0**100

# Ratio of a scale of its own to the merged one from which hooks are worth their time.
_WORTH_HOOKS = 2.0**6

# Scales of several losses within this factor of each other are equalized.
_LOSSES_APART = 16.0

MethodAlpha = Callable[[str, float, float], Tuple[float, Reason]]
"""Alpha of a layer from a method, and its reason; called with the layer, S, and S without compensation of a
small loss.
"""


class ScaleLimits(NamedTuple):
    """Largest scale of each component, by index, and its causes."""

    limits: Sequence[Optional[float]]  # None: unmeasured, or only zeros measured
    provisional: Mapping[int, float]  # limits after an overflow
    loss_weights: Tuple[float, ...]  # 0: inactive in this batch
    unit_amaxes: Sequence[Optional[float]]  # None: unmeasured
    underflowed: AbstractSet[int] = frozenset()  # measured as zero, although predecessors are not
    equalize: bool = True  # True if successive components may share a scale
    bounds: Mapping[int, AlphaBounds] = {}  # bounds of alphas, by position of the weight
    floors: Mapping[int, float] = {}  # below which a scale loses bits; missing: not lowered for a weight

    def with_s0(self, components: Components, scale: float) -> ScaleLimits:
        """Limit the components at the loss by a given S0, divided by their loss weights."""
        limits = list(self.limits)
        for index in components.at_loss:
            weight, own = self.loss_weights[index], limits[index]
            if weight:
                limits[index] = min(within_float32(scale / weight), math.inf if own is None else own)
        # Bits of a weight do not lower a scale that was given.
        floors = {i: floor for i, floor in self.floors.items() if i not in components.at_loss}
        return self._replace(limits=limits, floors=floors)

    def scale_after(
        self,
        components: Components,
        edge: Edge,
        own: Optional[float],
        before: float,
        wanted: float,
        start: Start,
        largest: float,
    ) -> float:
        """Scale after an edge, for a method that requests `before`, the scale before it, times `wanted`: at
        most its limit `own`; None: an estimate, where edges bring gradients of at most `largest`.
        """
        if own is not None:
            return min(before * wanted, own)
        if edge.layer is None or edge.predecessor in components.scalars:
            unit_amax = self.unit_amaxes[edge.predecessor] or 1.0
            # As at the loss, in the formulas above.
            return self.first(edge.successor, start.start_scale / unit_amax, before, start.span)
        arriving = before * wanted if wanted < math.inf else before
        # Another edge into this component may carry larger gradients.
        return arriving * self._size(edge) / largest

    def largest(self, components: Components) -> Dict[int, float]:
        """Largest gradient that edges bring into each component, by index; empty if all are measured."""
        sizes: Dict[int, float] = {}
        for edge in components.edges if None in self.limits else ():
            sizes[edge.successor] = max(self._size(edge), sizes.get(edge.successor, 0.0))
        return sizes

    def _size(self, edge: Edge) -> float:
        """Largest gradient before an edge with the present loss weights; these alone, if it is unmeasured."""
        if edge.layer is None:
            # A function at the loss may multiply by a loss weight, which only its successor's includes.
            return self.loss_weights[edge.successor]
        return self.loss_weights[edge.predecessor] * (self.unit_amaxes[edge.predecessor] or 1.0)

    def first(self, index: int, start: float, before: float, span: float) -> float:
        """Scale of an unmeasured component: `start`, divided by its loss weight; after an underflow `span`
        times that, or times `before`, its predecessor's scale, if that is lower.
        """
        scale = start / (self.loss_weights[index] or 1.0)
        if index in self.underflowed:
            # Measure again: `span` times gradients below u_min still keeps the margin below u_max.
            scale = max(scale, min(scale, before) * span)
        return within_float32(scale)

    def merged(self, of: Sequence[int], count: int) -> ScaleLimits:
        """Limits of `count` merged components, each made of those with its index in `of`: the strictest
        limits, and the largest amax and loss weight.
        """
        limits: List[Optional[float]] = [None] * count
        amax: List[Optional[float]] = [None] * count
        weight = [0.0] * count
        provisional: Dict[int, float] = {}
        floors: Dict[int, float] = {}
        for own, index in enumerate(of):
            limit, unit_amax, largest = self.limits[own], self.unit_amaxes[own], amax[index]
            if limit is not None:
                limits[index] = min(limit, limits[index] or limit)
            if unit_amax is not None:
                amax[index] = max(unit_amax * self.loss_weights[own], largest or 0.0)
            weight[index] = max(weight[index], self.loss_weights[own])
            if own in self.provisional:
                provisional[index] = min(self.provisional[own], provisional.get(index, math.inf))
            if own in self.floors:
                floors[index] = max(self.floors[own], floors.get(index, 0.0))
        return ScaleLimits(
            limits=limits,
            provisional=provisional,
            loss_weights=tuple(weight),
            unit_amaxes=[None if a is None else a / (w or 1.0) for a, w in zip(amax, weight)],
            underflowed={of[own] for own in self.underflowed},
            equalize=self.equalize,
            bounds=self.bounds,
            floors=floors,
        )

    def of_root(self, start: float, span: float) -> float:
        """Scale of a loss gradient that is not 1, but measured like any other; arguments: as of `first`."""
        own = self.first(0, start, math.inf, span) if self.limits[0] is None else self.limits[0]
        return min(own, self.provisional.get(0, math.inf))


class Start(NamedTuple):
    """Scales from which a choice starts."""

    root_scale: float  # of the loss gradient
    start_scale: float  # S0 of a loss of normal size: the reference of `accum_upper_bound`
    span: float  # ratio of the largest to the smallest magnitude of gradients
    power_of_two: bool = True  # True if every other scale is the root's times a power of two


class Choice(NamedTuple):
    """Scales of a pass."""

    scales: List[float]  # by component
    reasons: Dict[str, Reason]  # by layer, for its alpha


def choose(
    components: Components, limits: ScaleLimits, start: Start, method_alpha: Optional[MethodAlpha]
) -> Choice:
    """Choose the scale of each component: along the edges from the loss, then lowered for weights."""
    equalized_limits, weights = _equalized(components, limits), limits.loss_weights
    scale_of, alphas = {components.root: start.root_scale}, {components.root: 1.0}  # products of alphas
    nonzero = {components.root}  # components that receive a nonzero gradient
    reasons: Dict[str, Reason] = {}
    largest = limits.largest(components)
    for edge in _in_order(components, weights):
        before, own, layer = scale_of[edge.predecessor], equalized_limits[edge.successor], edge.layer
        wanted, reason = math.inf, Reason.SCALE_LIMIT
        if layer is not None and method_alpha is not None:
            # Bounds of methods do not count a scale above the start scale, as of a small loss.
            base = min(before, start.start_scale * alphas[edge.predecessor])
            wanted, reason = method_alpha(layer, before, base)
        scale = limits.scale_after(
            components, edge, own, before, wanted, start, largest.get(edge.successor, 0.0)
        )
        if scale == own:
            reason = Reason.SCALE_LIMIT if own == limits.limits[edge.successor] else Reason.EQUALIZED
        scale = min(scale, limits.provisional.get(edge.successor, math.inf))
        scale = before * floor_power_of_two(scale / before) if start.power_of_two else scale
        # Of several edges into an unmeasured component, the first with a nonzero gradient determines its
        # scale.
        arrives = edge.predecessor in nonzero
        if edge.successor not in scale_of or (own is None and arrives and edge.successor not in nonzero):
            scale_of[edge.successor] = scale
            alphas[edge.successor] = alphas[edge.predecessor] * (1.0 if layer is None else scale / before)
        elif scale != scale_of[edge.successor]:
            reason = Reason.BRANCHES
        # A scalar zero is inactive in the batch; of an array all elements may have underflowed.
        if own is not None or (arrives and edge.successor not in components.scalars):
            nonzero.add(edge.successor)
        if layer is not None:
            reasons[layer] = reason
    # A component without incoming edges gets no gradient.
    scales = [scale_of.get(index, start.root_scale) for index in range(len(equalized_limits))]
    _fit_weights(components, scales, limits, reasons)
    _set_inactive(components, scales, weights, start.root_scale)
    return Choice(scales, reasons)


def choose_merged(
    components: Components,
    merged: MergedComponents,
    limits: ScaleLimits,
    choice_of: Callable[[Components, ScaleLimits], Choice],
    spread: float,
) -> Optional[Choice]:
    """Choose scales that are equal for components that only hooks could split; None: a leaf would underflow,
    its largest contributions more than a factor `spread` below their limit.
    """
    choice = choice_of(merged.components, limits.merged(merged.of, len(merged.components.names)))
    choice = choice._replace(scales=[choice.scales[index] for index in merged.of])
    own = limits.limits
    low = {i for i, limit in enumerate(own) if limit is not None and limit > spread * choice.scales[i]}
    if not low:
        return choice
    split = choice_of(components, limits).scales
    far = {i for i in low if split[i] > _WORTH_HOOKS * choice.scales[i]}
    # Gradients that have underflowed there bring their errors to all descendants.
    underflow = set().union(*map(components.descendants, far))
    for writers in components.leaves.values():
        by_limit = {limit: index for index in writers for limit in [own[index]] if limit is not None}
        # The smallest limit is that of the largest contributions.
        if by_limit and by_limit[min(by_limit)] in underflow:
            return None
    return choice


def _in_order(components: Components, loss_weights: Sequence[float]) -> Iterator[Edge]:
    """Yield the edges between active components, each after one that reaches its start."""
    # The first edge to a trunk may come from an inactive head.
    reached = {components.root}
    waiting = [
        edge for edge in components.edges if loss_weights[edge.predecessor] and loss_weights[edge.successor]
    ]
    while waiting:
        later = []
        for edge in waiting:
            if edge.predecessor in reached:
                reached.add(edge.successor)
                yield edge
            else:
                later.append(edge)
        waiting = later if len(later) < len(waiting) else []


def _equalized(components: Components, limits: ScaleLimits) -> Sequence[Optional[float]]:
    """Equalize close limits, as each change of scale costs a copied weight: those of the components at the
    loss, then those of neighbours in backward order, by which components are numbered. Scalars keep their
    own, as multiplying one is free.
    """
    result = list(limits.limits)
    if limits.equalize:
        scalars = components.scalars
        ends = {e.successor for e in components.edges if e.layer is None and e.predecessor in scalars}
        at_loss = [i for i in ends - scalars if result[i] is not None]
        smallest = min([result[i] or 0.0 for i in at_loss], default=0.0)
        for index in at_loss:
            if (result[index] or 0.0) <= _LOSSES_APART * smallest:
                result[index] = smallest
        many = [(i, limit) for i, limit in enumerate(result) if limit is not None and i not in scalars]
        for (index, _), limit in zip(many, equalized([limit for _, limit in many])):
            result[index] = limit
    return result


def within_float32(scale: float) -> float:
    """Clamp `scale` to the range in which float32 can multiply and divide by it."""
    return min(max(scale, 1.0 / _LARGEST), _LARGEST)


def _set_inactive(
    components: Components, scales: List[float], loss_weights: Sequence[float], start: float
) -> None:
    """Give components without a gradient the largest scale of their successors, or else `start`."""
    edges = [edge for edge in reversed(components.edges) if not loss_weights[edge.predecessor]]
    for edge in edges:
        scales[edge.predecessor] = 0.0
    # Scales only increase, to present values, so the loop terminates.
    risen = True
    while risen:
        risen = False
        for edge in edges:
            if scales[edge.successor] > scales[edge.predecessor]:
                scales[edge.predecessor], risen = scales[edge.successor], True
    for edge in edges:
        scales[edge.predecessor] = scales[edge.predecessor] or start


def _fit_weights(
    components: Components, scales: List[float], limits: ScaleLimits, reasons: Dict[str, Reason]
) -> None:
    """Lower scales until the scaled copy of every weight stays in range, and then until it keeps its bits."""
    weights, bounds = limits.loss_weights, limits.bounds
    edges = [edge for edge in components.edges if edge.weight in bounds and weights[edge.predecessor]]
    # Scales only decrease, so both loops terminate.
    lowered = True
    while lowered:
        lowered = False
        for edge in edges:
            highest = scales[edge.predecessor] * bounds[edge.weight].highest
            if scales[edge.successor] > highest:
                scales[edge.successor], lowered = highest, True
                reasons[edge.layer or ""] = Reason.WEIGHT_RANGE
    # From the leaves on: lowering a scale may require lowering its predecessors, except the root.
    floors = limits.floors
    edges = [e for e in reversed(edges) if e.predecessor in floors and e.predecessor != components.root]
    lowered = True
    while lowered:
        lowered = False
        for edge in edges:
            before, after, own = scales[edge.predecessor], scales[edge.successor], bounds[edge.weight]
            if after >= before * own.enough:
                continue
            # A lower scale before raises the alphas of all its layers: `lowest`, one of them to its highest.
            lowest = max(
                scales[e.successor] / bounds[e.weight].highest
                for e in edges
                if e.predecessor == edge.predecessor
            )
            least, wanted = max(floors[edge.predecessor], lowest), after / own.enough
            if after < least * own.least:
                # The copy would keep no bit: gradients give up some of theirs.
                least, wanted = max(floors[edge.predecessor] / own.further, lowest), after / own.least
            by = floor_power_of_two(before / max(least, wanted))
            if by > 1.0 and after >= least * own.least:
                scales[edge.predecessor], lowered = before / by, True
