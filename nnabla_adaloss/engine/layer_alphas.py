# SPDX-License-Identifier: Apache-2.0
"""Where the scale of a layer comes from: its method, or the components that it connects."""

from __future__ import annotations

from typing import Protocol, Tuple

from ..core.ada_loss import AdaLoss
from ..core.component_scale import component_alpha
from ..core.layer_scale import Constraints, Decision, LayerState, Observed
from ..core.methods import Fixed
from ..core.statistics import ArrayStatistics
from ..graph.node import Node, Scaling
from .component_scales import ComponentPass
from .running_pass import RunningPass


class LayerAlphas(Protocol):
    """Chooses the scales of layers."""

    def alpha(self, running: RunningPass, node: Node, scaling: Scaling, scale: float) -> float:
        """What the input gradient of a layer is multiplied by, when its output gradient carries `scale`.

        What is stored already where the input gradient is added is brought to the same scale.
        """


class AlphasByMethod:
    """Each layer by itself, from the statistics of its gradient and weight.

    Args:
        ada_loss: decides, and remembers.
        constraints: what all scales respect.
    """

    def __init__(self, ada_loss: AdaLoss, constraints: Constraints) -> None:
        self._ada_loss = ada_loss
        self._constraints = constraints
        method = ada_loss.config.method
        # A constant that cannot overflow by itself needs no look at any array.
        self._measures = not isinstance(method, Fixed) or method.fixed_loss_scale > 1.0

    def alpha(self, running: RunningPass, node: Node, scaling: Scaling, scale: float) -> float:
        """As `decide` says."""
        g, w = _operands(running, node, scaling, scale) if self._measures else (None, None)
        slot = scaling.slot
        observed = Observed(
            running.iteration,
            scale,
            slot.fan_in,
            slot.fan_in_bound,
            g,
            w,
            True,
            # Another branch of the loss may have been raised further.
            max(1.0, min(running.lift, scale / running.start_scale)),
            None if self._ada_loss.takes_statistics else lambda: scaling.matrices(node),
            running.attempt,
        )
        constraints = _constraints_of(scaling, running, self._constraints)
        # A leaf's gradient is kept unscaled, in an array of its own: there is nothing to meet.
        stored = None if scaling.to_leaf else running.scales.get(scaling.target_key)
        if stored is not None:
            earlier = _EarlierContribution(running, node, scaling, scale, stored)
            constraints = constraints._replace(earlier=earlier)
        alpha = self._ada_loss.decide(scaling.layer, observed, constraints).alpha
        if stored is not None:
            running.match(scaling.target, scaling.target_key, scale * alpha)
        return alpha


class AlphasOfOne:
    """No layer is scaled."""

    def alpha(self, running: RunningPass, node: Node, scaling: Scaling, scale: float) -> float:
        """1."""
        if not scaling.to_leaf and scaling.target_key in running.scales:
            running.bring_to(scaling.target, scaling.target_key, scale)
        return 1.0


class AlphasByComponent:
    """Each layer leads from the scale of one component to that of another.

    Args:
        ada_loss: remembers and reports what was decided.
        constraints: what all scales respect.
        components: the scales.
    """

    def __init__(self, ada_loss: AdaLoss, constraints: Constraints, components: ComponentPass) -> None:
        self._ada_loss = ada_loss
        self._constraints = constraints
        self._components = components

    def alpha(self, running: RunningPass, node: Node, scaling: Scaling, scale: float) -> float:
        """The ratio of two components' scales."""
        component = self._components.of[scaling.target_key]
        wanted = self._components.scales[component]
        # It is asked for, and thereby measured, also where it is not needed at once.
        g = running.statistics.gradient(node.outputs[0], node.output_keys[0], scale)
        storage, slot = running.storage, scaling.slot
        weight = None if storage is None else storage.data_statistics(scaling.factor_key)
        if wanted is None or (weight is None and node.half):
            # Its scaled copy is stored as it is, and must not leave the range.
            weight = running.statistics.data(scaling.factor, scaling.factor_key)
        constraints = _constraints_of(scaling, running, self._constraints)
        u_max = running.u_max if constraints.range is None else constraints.range.u_max
        alpha, reason = component_alpha(scale, wanted, g, weight, slot.fan_in_bound, u_max, constraints)
        if not scaling.to_leaf and scaling.target_key in running.scales:
            running.match(scaling.target, scaling.target_key, scale * alpha)
        self._components.scales[component] = scale * alpha
        observed = Observed(
            running.iteration, scale, slot.fan_in, slot.fan_in_bound, g, weight, attempt=running.attempt
        )
        state = LayerState(running.iteration, alpha, alpha=alpha)
        self._ada_loss.take_over(scaling.layer, observed, Decision(alpha, reason, state))
        return alpha


def _constraints_of(scaling: Scaling, running: RunningPass, constraints: Constraints) -> Constraints:
    return constraints if running.ranges is None else running.ranges.of_layer(constraints, scaling)


def _operands(
    running: RunningPass, node: Node, scaling: Scaling, scale: float
) -> Tuple[ArrayStatistics, ArrayStatistics]:
    g = running.statistics.gradient(node.outputs[0], node.output_keys[0], scale)
    return g, running.statistics.data(scaling.factor, scaling.factor_key)


class _EarlierContribution:
    """What a layer's input gradient is added to; it is looked at only when the scales differ."""

    __slots__ = ("_node", "_pass", "_previous_scale", "_scaling", "scale")

    def __init__(
        self, running: RunningPass, node: Node, scaling: Scaling, previous_scale: float, scale: float
    ) -> None:
        self._pass, self._node, self._scaling = running, node, scaling
        self._previous_scale = previous_scale
        self.scale = scale

    @property
    def own_abs_max(self) -> float:
        """Bound of the layer's input gradient with an alpha of 1, and of its weight."""
        g, w = _operands(self._pass, self._node, self._scaling, self._previous_scale)
        return max(self._scaling.slot.fan_in_bound * g.abs_max, 1.0) * w.abs_max

    @property
    def abs_max(self) -> float:
        """The largest magnitude of what is there."""
        return self._pass.abs_max(self._scaling.target, self._scaling.target_key)
