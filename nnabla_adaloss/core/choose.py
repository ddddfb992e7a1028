# SPDX-License-Identifier: Apache-2.0
"""The algorithm: one scale for each component of the gradients, chosen before every backward pass.

A component is a set of gradients that are connected by functions which only pass a scale on. An edge leads
from a component to one that backward reaches later: a layer, which multiplies by a weight, a scalar function
at the loss, or a function whose gradient is not linear. S(c) is the scale of the gradients of component c:

    S(root) = S0 if given; else limit(root), or for a loss gradient of 1 the largest power of two in range
    S(c)    = min(limit(c), S(before) * alpha_m)              by the first edge that leads to c
    S(c)    = S(before) * alpha_m * size(edge) / largest(c)   after a layer, if unmeasured
    S(c)    = start scale / (amax(before) * weight(c))        at the loss, if unmeasured
    S(c)    = up to u_max / (margin * u_min) times as high    at the loss, if c has underflowed
    S(c)    = lowered, until alpha * max|W| stays in range for every layer that leads to c
    S(before) = lowered, down to limit(before) / spare, until the copies alpha * W of the layers after it
                keep their bits; not at the root, nor at the loss with a given S0
    alpha   = S(c) / S(before)         of a layer: a power of two

    weight(c)  = loss weight of a component, read from the graph before the pass
    amax(c)    = unit amax: largest remembered gradient of c, divided by its batch's loss weight; 1 if none
    size(edge) = amax(before) * weight(before), the largest gradient expected before the edge
    largest(c) = the largest size of all edges that lead to c
    limit(c)   = the largest power of two with S * amax(c) * weight(c) <= u_max / margin; with a given S0
                 also S0 / weight(c) for components that no layer leads to
    alpha_m    = the layer's alpha from the loss scale method; infinite for "amax_history"
    equalized  : components that follow each other have the smallest of their limits, if these are at most two
                 bits apart; so have those after several losses, if at most four bits apart
    merged     : components that only hooks could split are one, with the smallest of their limits
    spare      : 2^12 for float16: gradients that far below their limit keep their bits, too; 2^20 where
                 the copy would lose nearly all bits otherwise
    inactive   : with a loss weight of 0, c limits nothing, and has its successors' largest scale
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import AbstractSet, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from .components import Components, Edge, MergedComponents
from .layer_alpha import AlphaBounds
from .layer_record import Reason
from .power_of_two import floor_power_of_two, within_float32

_WORTH_HOOKS = 2.0**6  # ratio of a split scale to the merged one above which hooks are worth their time
_APART = 4.0  # factor within which the limits of successive components are equalized
_LOSSES_APART = 16.0  # factor within which the limits after several losses are equalized

MethodAlpha = Callable[[str, float, float], Tuple[float, Reason]]
"""Alpha and its reason, of a layer's name, S before it, and that S uncompensated for a small loss weight."""


class ScaleLimits(NamedTuple):
    """Largest scale of each component, by index, and its causes."""

    limits: Sequence[Optional[float]]  # None: unmeasured, or only zeros measured
    provisional: Mapping[int, float]  # limits after an overflow
    loss_weights: Tuple[float, ...]  # 0: inactive in this batch
    unit_amaxes: Sequence[Optional[float]]  # None: unmeasured
    underflowed: AbstractSet[int] = frozenset()  # measured as zero, although predecessors are not
    equalize: bool = True  # True if close limits are equalized
    bounds: Mapping[int, AlphaBounds] = {}  # bounds of alphas, by position of the weight
    # Scale of a component below which its gradients lose bits; without one it is not lowered for weights.
    floors: Mapping[int, float] = {}

    def with_s0(self, components: Components, s0: float) -> ScaleLimits:
        """Limit each scale at the loss to a given S0, divided by the component's loss weight."""
        limits = list(self.limits)
        for index in components.at_loss:
            weight, limit = self.loss_weights[index], limits[index]
            if weight:
                limits[index] = min(within_float32(s0 / weight), math.inf if limit is None else limit)
        # Without floors, these scales are not lowered for weights: a given S0 stays.
        floors = {i: floor for i, floor in self.floors.items() if i not in components.at_loss}
        return self._replace(limits=limits, floors=floors)

    def size_before(self, edge: Edge) -> float:
        """Largest unscaled gradient expected before an edge; at the loss, times the edge's factor."""
        if edge.layer is None:
            # The loss gradient is 1. The successor's loss weight is the product of all factors from there on.
            return self.loss_weights[edge.successor]
        unit_amax = self.unit_amaxes[edge.predecessor]
        return self.loss_weights[edge.predecessor] * (1.0 if unit_amax is None else unit_amax)

    def first_scale(self, index: int, unweighted: float, predecessor_scale: float, span: float) -> float:
        """Scale of a component without limit; `unweighted`: for a loss weight of 1; `span`: as in `Start`."""
        # The root is chosen although its loss weight may be 0, as with a loss gradient of zeros.
        scale = unweighted / (self.loss_weights[index] or 1.0)
        if index in self.underflowed:
            # The function that computed it ran at the lower of the two scales, and all results were below
            # u_min. `span` times as high, they are below u_max / margin.
            scale = max(scale, min(scale, predecessor_scale) * span)
        return within_float32(scale)

    def merged(self, merged_of: Sequence[int]) -> ScaleLimits:
        """Limits of merged components that suit each of their parts; `merged_of`: their index, by part."""

        def merge(
            pick: Callable[..., float], parts: Iterable[Tuple[int, Optional[float]]]
        ) -> Dict[int, float]:
            """Pick one value for each merged component of which any part has one."""
            values: Dict[int, List[float]] = defaultdict(list)
            for part, value in parts:
                if value is not None:
                    values[merged_of[part]].append(value)
            return {index: pick(of_index) for index, of_index in values.items()}

        limits, weights = merge(min, enumerate(self.limits)), merge(max, enumerate(self.loss_weights))
        # Loss weights of parts differ, so that their unit amaxes cannot be compared, but their gradients can.
        amaxes = [None if a is None else a * w for a, w in zip(self.unit_amaxes, self.loss_weights)]
        unit_amaxes = {i: amax / (weights[i] or 1.0) for i, amax in merge(max, enumerate(amaxes)).items()}
        indices = range(len(weights))
        return self._replace(
            limits=[limits.get(i) for i in indices],
            provisional=merge(min, self.provisional.items()),
            loss_weights=tuple([weights[i] for i in indices]),
            unit_amaxes=[unit_amaxes.get(i) for i in indices],
            underflowed={merged_of[part] for part in self.underflowed},
            floors=merge(max, self.floors.items()),
        )

    def root_scale(self, start_scale: float, span: float) -> float:
        """Scale of a loss gradient that is an array or given by the caller; arguments as in `Start`."""
        scale = self.limits[0]
        if scale is None:
            scale = self.first_scale(0, start_scale, math.inf, span)  # no predecessor
        return min(scale, self.provisional.get(0, math.inf))


class Start(NamedTuple):
    """Scales from which a choice starts."""

    root_scale: float  # of the loss gradient
    # The given S0, or the initial one. A higher `root_scale` only compensates a small loss: unmeasured
    # components and `accum_upper_bound` are relative to `start_scale`.
    start_scale: float
    span: float  # u_max / (margin * u_min): brings the smallest magnitude to keep to a margin below u_max
    power_of_two: bool = True  # True if every other scale is the root's times a power of two


class Choice(NamedTuple):
    """Scales of a pass."""

    scales: List[float]  # by component
    reasons: Dict[str, Reason]  # by layer, for its alpha


def choose(
    components: Components, limits: ScaleLimits, start: Start, method_alpha: Optional[MethodAlpha]
) -> Choice:
    """Choose the scale of each component by the formulas above; `method_alpha`: None for "amax_history"."""
    shared_limits = _equalize(components, limits)
    largest: Dict[int, float] = {}  # by successor, for unmeasured ones: the largest size before edges to it
    for edge in components.edges if None in limits.limits else ():
        largest[edge.successor] = max(limits.size_before(edge), largest.get(edge.successor, 0.0))
    scale_of = {components.root: start.root_scale}
    alpha_products = {components.root: 1.0}  # of the layers from the loss to each component
    nonzero = {components.root}  # components that receive a nonzero gradient
    reasons: Dict[str, Reason] = {}
    for edge in _in_order(components, limits.loss_weights):
        predecessor, successor, layer, _ = edge
        scale_before, limit = scale_of[predecessor], shared_limits[successor]
        # Alpha that the method requests.
        alpha, reason = math.inf, Reason.SCALE_LIMIT
        if layer is not None and method_alpha is not None:
            # The method's bounds limit S without the part that compensates a small loss.
            uncompensated = min(scale_before, start.start_scale * alpha_products[predecessor])
            alpha, reason = method_alpha(layer, scale_before, uncompensated)
        # Scale that this edge gives its successor.
        if limit is not None:
            scale = min(scale_before * alpha, limit)
            if scale == limit:
                reason = Reason.SCALE_LIMIT if limit == limits.limits[successor] else Reason.EQUALIZED
        elif layer is None or predecessor in components.scalar_components:
            # Unmeasured after a scalar or function at the loss: expect the unit amax of the predecessor.
            unweighted = start.start_scale / (limits.unit_amaxes[predecessor] or 1.0)
            scale = limits.first_scale(successor, unweighted, scale_before, start.span)
        else:
            # Unmeasured after a layer: the scale before it, lowered if another edge brings larger gradients.
            scale = scale_before * alpha if alpha < math.inf else scale_before
            size = limits.size_before(edge)
            if size:  # 0: a branch that has underflowed, whose gradients have no known size
                scale *= size / largest[successor]
        scale = min(scale, limits.provisional.get(successor, math.inf))
        if start.power_of_two:
            scale = scale_before * floor_power_of_two(scale / scale_before)
        # The first edge determines the scale of its successor. But an unmeasured one follows its predecessor:
        # if that has only zeros, such as a dead head, the first edge with nonzero gradients overrules it.
        overrules = limit is None and predecessor in nonzero and successor not in nonzero
        if successor not in scale_of or overrules:
            scale_of[successor] = scale
            applied = 1.0 if layer is None else scale / scale_before
            alpha_products[successor] = alpha_products[predecessor] * applied
        elif scale != scale_of[successor]:
            reason = Reason.BRANCHES
        # Gradients after nonzero ones are nonzero, but unmeasured scalars may be 0, as at a hinge loss of 0.
        passes_nonzero = predecessor in nonzero and successor not in components.scalar_components
        if limit is not None or passes_nonzero:
            nonzero.add(successor)
        if layer is not None:
            reasons[layer] = reason
    # A component to which no active edge leads gets no gradient: any scale suits it.
    scales = [scale_of.get(index, start.root_scale) for index in range(len(components.names))]
    edges = [e for e in components.edges if e.weight in limits.bounds and limits.loss_weights[e.predecessor]]
    _keep_weights_in_range(edges, scales, limits.bounds, reasons)
    may_be_lowered = limits.floors.keys() - {components.root}
    _keep_bits_of_weights([e for e in edges if e.predecessor in may_be_lowered], scales, limits)
    _set_inactive(components, scales, limits, start)
    return Choice(scales, reasons)


def choose_merged(
    components: Components,
    merged: MergedComponents,
    limits: ScaleLimits,
    choice_of: Callable[[Components, ScaleLimits], Choice],
    spread: float,
) -> Optional[Choice]:
    """Choose equal scales for components that only hooks could split. None if hooks are worth their time: the
    largest contributions to a leaf underflow, and split scales are more than `_WORTH_HOOKS` times as high.
    `spread`: ratio of limit to scale up to which gradients do not underflow.
    """
    choice = choice_of(merged.components, limits.merged(merged.of))
    choice = choice._replace(scales=[choice.scales[index] for index in merged.of])  # of the parts
    limit_of = {i: limit for i, limit in enumerate(limits.limits) if limit is not None}
    underflowing = {i for i, limit in limit_of.items() if limit > spread * choice.scales[i]}
    if not underflowing:
        return choice
    split = choice_of(components, limits)
    worth_hooks = {i for i in underflowing if split.scales[i] > _WORTH_HOOKS * choice.scales[i]}
    # Rounding errors of gradients that underflow reach all descendants.
    inexact = components.with_descendants(worth_hooks)
    for contributors in components.leaves.values():
        # The smallest limit: the largest gradients. Of equal ones any will do: half of their sum is exact.
        by_limit = {limit_of[i]: i for i in contributors if i in limit_of}
        if by_limit and by_limit[min(by_limit)] in inexact:
            return None
    return choice


def _in_order(components: Components, loss_weights: Sequence[float]) -> Iterable[Edge]:
    """Yield the edges between active components, each after one that reaches its predecessor."""
    # Usually this is backward order. But the first edge to a trunk of several heads may come from an inactive
    # head: then edges from the trunk wait until an active head has reached it.
    reached = {components.root}
    waiting = [e for e in components.edges if loss_weights[e.predecessor] and loss_weights[e.successor]]
    while waiting:
        later = []
        for edge in waiting:
            if edge.predecessor in reached:
                reached.add(edge.successor)
                yield edge
            else:
                later.append(edge)
        waiting = later if len(later) < len(waiting) else []  # else nothing leads to these edges


def _equalize(components: Components, limits: ScaleLimits) -> Sequence[Optional[float]]:
    """Equalize close limits of arrays: a layer between different scales would have to copy its weight."""
    if not limits.equalize:
        return limits.limits
    scalars = components.scalar_components
    of_arrays = {i: limit for i, limit in enumerate(limits.limits) if limit is not None and i not in scalars}
    # The first arrays after several losses.
    after_scalars = {e.successor for e in components.edges if e.layer is None and e.predecessor in scalars}
    after_losses = {i: of_arrays[i] for i in after_scalars & of_arrays.keys()}
    smallest = min(after_losses.values(), default=0.0)
    of_arrays.update({i: smallest for i, own in after_losses.items() if own <= _LOSSES_APART * smallest})
    # Arrays that follow each other in backward order, which is the order of the components.
    runs: List[List[int]] = []  # of components with close limits
    smallest, largest = math.inf, 0.0  # of the last run
    for index, limit in of_arrays.items():
        smallest, largest = min(smallest, limit), max(largest, limit)
        if not runs or largest > _APART * smallest:
            runs.append([])
            smallest = largest = limit
        runs[-1].append(index)
    for run in runs:
        of_arrays.update(dict.fromkeys(run, min([of_arrays[index] for index in run])))
    return [of_arrays.get(index, limit) for index, limit in enumerate(limits.limits)]


def _set_inactive(components: Components, scales: List[float], limits: ScaleLimits, start: Start) -> None:
    """Give inactive components the largest scale of their successors, or else the root's: their alphas are at
    most 1. A larger one might make a weight's copy infinite, and its product with the gradient 0 NaN.
    """
    edges = [edge for edge in reversed(components.edges) if not limits.loss_weights[edge.predecessor]]
    for edge in edges:
        scales[edge.predecessor] = 0.0
    before: List[float] = []
    while scales != before:  # until no scale rises; each rises to another in the list, so this ends
        before = [*scales]
        for edge in edges:
            scales[edge.predecessor] = max(scales[edge.predecessor], scales[edge.successor])
    for edge in edges:
        scales[edge.predecessor] = scales[edge.predecessor] or start.root_scale


def _keep_weights_in_range(
    edges: Sequence[Edge], scales: List[float], bounds: Mapping[int, AlphaBounds], reasons: Dict[str, Reason]
) -> None:
    """Lower the scales after layers until no alpha exceeds its highest, where alpha * W would overflow."""
    # A lowered scale may be the one before other layers. `highest` is at least 1 (see `AlphaBounds`): along a
    # cycle of layers no scale lowers itself further, so the loop terminates.
    lowered = True
    while lowered:
        lowered = False
        for edge in edges:
            highest = scales[edge.predecessor] * bounds[edge.weight].highest
            if scales[edge.successor] > highest:
                scales[edge.successor], lowered = highest, True
                reasons[edge.layer or ""] = Reason.WEIGHT_RANGE  # an edge with a weight has a layer


def _keep_bits_of_weights(edges: Sequence[Edge], scales: List[float], limits: ScaleLimits) -> None:
    """Lower scales before layers until the copies alpha * W keep their bits, but not below the floors, where
    gradients begin to lose theirs; a scale falls below its floor only to save a few bits of a copy from 0.
    """
    # From the end of backward: lower scales may require lower predecessors. `lowest` ends these steps.
    lowered = True
    while lowered:
        lowered = False
        for edge in reversed(edges):
            scale_before, scale_after = scales[edge.predecessor], scales[edge.successor]
            bounds, floor = limits.bounds[edge.weight], limits.floors[edge.predecessor]
            if scale_after >= scale_before * bounds.least_for_bits:
                continue  # alpha is large enough
            # A lower scale raises the alphas of all layers after it, of which none may exceed its highest.
            layers_after = [e for e in edges if e.predecessor == edge.predecessor]
            in_range = max([scales[e.successor] / limits.bounds[e.weight].highest for e in layers_after])
            alpha, lowest = bounds.least_for_bits, max(floor, in_range)
            if scale_after < lowest * bounds.least_for_few_bits:
                # The copy would keep hardly a bit: gradients give up some of theirs for a few of its bits.
                alpha, lowest = bounds.least_for_few_bits, max(floor / bounds.beyond_floor, in_range)
                if scale_after < lowest * alpha:
                    continue  # even so the copy would keep hardly a bit
            # `scale_after / alpha` is the scale before the layer at which its alpha is large enough.
            factor = floor_power_of_two(scale_before / max(lowest, scale_after / alpha))
            if factor > 1.0:
                scales[edge.predecessor], lowered = scale_before / factor, True
