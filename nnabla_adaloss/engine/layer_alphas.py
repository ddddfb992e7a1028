# SPDX-License-Identifier: Apache-2.0
"""Where the scale of a layer comes from: its method, or the components that it connects."""

from __future__ import annotations

from typing import Tuple

from ..core.ada_loss import AdaLoss
from ..core.component_scale import component_alpha
from ..core.layer_scale import Constraints, Decision, LayerState, Observed
from ..core.methods import Fixed
from ..core.statistics import ArrayStatistics
from ..graph.node import LayerSlot, NodeStructure
from .choosing import ScaleChooser
from .component_pass import ComponentPass
from .statistics import NOTHING_KNOWN


class AlphasByMethod:
    """Each layer by itself, from the statistics of its gradient and weight.

    Args:
        ada_loss: decides.
        constraints: what all scales respect.
    """

    def __init__(self, ada_loss: AdaLoss, constraints: Constraints) -> None:
        self._ada_loss = ada_loss
        self._constraints = constraints
        method = ada_loss.config.method
        # A constant that cannot overflow by itself needs no look at any array.
        self._measures = not isinstance(method, Fixed) or method.fixed_loss_scale > 1.0

    def alpha(self, chooser: ScaleChooser, node: NodeStructure, slot: LayerSlot, scale: float) -> float:
        """As `AdaLoss.decision` says."""
        g, w = _operands(chooser, node, slot, scale) if self._measures else (None, None)
        start, statistics = chooser.start, chooser.statistics
        observed = Observed(
            start.iteration,
            scale,
            slot.slot.fan_in,
            slot.slot.fan_in_bound,
            g,
            w,
            True,
            # Another branch of the loss may have been raised further.
            max(1.0, min(chooser.lift, scale / start.start_scale)),
            None
            if self._ada_loss.takes_statistics
            else lambda: statistics.matrices(node.number, node.slots.index(slot)),
            start.attempt,
        )
        constraints = _constraints_of(slot, chooser, self._constraints)
        # A leaf's gradient is kept unscaled, in an array of its own: there is nothing to meet.
        stored = None if slot.to_leaf else chooser.scales.get(slot.target)
        if stored is not None:
            earlier = _EarlierContribution(chooser, node, slot, scale, stored)
            constraints = constraints._replace(earlier=earlier)
        decision = self._ada_loss.decision(slot.layer, observed, constraints)
        chooser.decided.append((slot.layer, observed, decision))
        if stored is not None:
            chooser.match(slot.target, scale * decision.alpha)
        return decision.alpha


class AlphasOfOne:
    """No layer is scaled."""

    def alpha(self, chooser: ScaleChooser, node: NodeStructure, slot: LayerSlot, scale: float) -> float:
        """1."""
        if not slot.to_leaf and slot.target in chooser.scales:
            chooser.bring_to(slot.target, scale)
        return 1.0


class AlphasByComponent:
    """Each layer leads from the scale of one component to that of another.

    Args:
        components: the scales.
        constraints: what all scales respect.
        looks: whether gradients are looked at also where their scales are known: they are measured when
            somebody asks for them, or reported. True.
    """

    def __init__(self, components: ComponentPass, constraints: Constraints, *, looks: bool = True) -> None:
        self._components = components
        self._constraints = constraints
        self._looks = looks

    def alpha(self, chooser: ScaleChooser, node: NodeStructure, slot: LayerSlot, scale: float) -> float:
        """The ratio of two components' scales."""
        component, statistics, start = self._components.of[slot.target], chooser.statistics, chooser.start
        wanted = self._components.scales[component]
        if wanted is None:
            wanted = self._components.sought(component)
        known = wanted is not None
        g = NOTHING_KNOWN
        if not known or self._looks:
            ask = statistics.look_at if known else statistics.gradient
            g = ask(node.outputs[0], scale)
        weight = statistics.stored_data(slot.factor)
        if not known or (weight is None and node.half):
            # Its scaled copy is stored as it is, and must not leave the range.
            weight = statistics.data(slot.factor)
        constraints = _constraints_of(slot, chooser, self._constraints)
        u_max = chooser.u_max if constraints.range is None else constraints.range.u_max
        alpha, reason = component_alpha(scale, wanted, g, weight, slot.slot.fan_in_bound, u_max, constraints)
        if not slot.to_leaf and slot.target in chooser.scales:
            chooser.match(slot.target, scale * alpha)
        self._components.scales[component] = scale * alpha
        fan_in, bound = slot.slot.fan_in, slot.slot.fan_in_bound
        observed = Observed(start.iteration, scale, fan_in, bound, g, weight, attempt=start.attempt)
        state = LayerState(start.iteration, alpha, alpha=alpha)
        chooser.decided.append((slot.layer, observed, Decision(alpha, reason, state)))
        return alpha


def _constraints_of(slot: LayerSlot, chooser: ScaleChooser, constraints: Constraints) -> Constraints:
    return constraints if chooser.ranges is None else chooser.ranges.of_layer(constraints, slot)


def _operands(
    chooser: ScaleChooser, node: NodeStructure, slot: LayerSlot, scale: float
) -> Tuple[ArrayStatistics, ArrayStatistics]:
    return chooser.statistics.gradient(node.outputs[0], scale), chooser.statistics.data(slot.factor)


class _EarlierContribution:
    """What a layer's input gradient is added to; it is looked at only when the scales differ."""

    __slots__ = ("_chooser", "_node", "_previous_scale", "_slot", "scale")

    def __init__(
        self, chooser: ScaleChooser, node: NodeStructure, slot: LayerSlot, previous_scale: float, scale: float
    ) -> None:
        self._chooser, self._node, self._slot = chooser, node, slot
        self._previous_scale = previous_scale
        self.scale = scale

    @property
    def own_abs_max(self) -> float:
        """Bound of the layer's input gradient with an alpha of 1, and of its weight."""
        g, w = _operands(self._chooser, self._node, self._slot, self._previous_scale)
        return max(self._slot.slot.fan_in_bound * g.abs_max, 1.0) * w.abs_max

    @property
    def abs_max(self) -> float:
        """The largest magnitude of what is there."""
        return self._chooser.abs_max(self._slot.target)
