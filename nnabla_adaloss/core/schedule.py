# SPDX-License-Identifier: Apache-2.0
"""Schedule of a backward pass: a scale per component, and steps around functions."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Dict, FrozenSet, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from .choose import within_float32
from .components import Components, MergedComponents, NodeStructure
from .layer_record import Reason

# Largest ratio between the scales of a float32 scalar and of its component, at whose scale 16 bits hold it.
# float32 still holds the scalar then, and the factor between two such scalars of equally scaled components.
_FLOAT_FACTOR = 2.0**60


class Rescale(NamedTuple):
    """Gradient that is multiplied in place, between two functions."""

    position: int
    factor: float


class Step(NamedTuple):
    """Work around the backward of one function."""

    before: Tuple[Rescale, ...]  # before it runs
    scale: float  # of the output gradient that it reads, and of its contributions, except those with an alpha
    alphas: Tuple[float, ...]  # of its layers, in the order of `NodeStructure.layer_inputs`
    after: Tuple[Rescale, ...]  # after it has run


@dataclass(frozen=True)
class ScaleSchedule:
    """Scales of one pass, for any graph of the same topology."""

    nodes: Sequence[NodeStructure]  # in backward order
    components: Components
    component_scales: Sequence[float]
    given_scale: Optional[float]  # S0, where it was given; None: it was measured
    loss_weights: Tuple[float, ...]  # of each component, for which it was chosen: powers of two; 0: inactive
    reasons: Mapping[str, Reason] = field(default_factory=dict)  # reason of alpha, by layer
    unbounded: Mapping[str, float] = field(default_factory=dict)  # result of the method, by layer
    merged: Optional[MergedComponents] = None  # merged components; None: none had to share a scale
    # Float32 functions whose scalar output's float32 gradient may leave its component's scale (`arriving`).
    float_functions: FrozenSet[int] = frozenset()

    @cached_property
    def seed_scale(self) -> float:
        """Scale of the seed gradient."""
        return self.scales[self.nodes[0].outputs[0]]

    @cached_property
    def loss_scale(self) -> float:
        """Reported S0: the root's scale; if measured, that of the first active component after scalars."""
        if self.given_scale is None:
            # A scalar root has the largest scale that its format allows, whatever the network.
            scalars, at_loss = self.components.scalar_components, self.components.at_loss
            for edge in self.components.edges:
                leaves_scalars = edge.predecessor in at_loss and edge.successor not in scalars
                if leaves_scalars and edge.layer is None and self.loss_weights[edge.successor]:
                    return self.component_scales[edge.successor]
        return self.component_scales[self.components.root]

    def loss_weight_of(self, position: int) -> float:
        """Loss weight of a gradient."""
        index = self.components.of.get(position)
        return 1.0 if index is None else self.loss_weights[index]

    def moved_to(self, loss_weights: Tuple[float, ...], max_scale: float) -> Optional[ScaleSchedule]:
        """Schedule with the same alphas for other loss weights, against which scales move; None unless the
        weights of all arrays move by one factor, and scales stay within `max_scale`.
        """
        if [old > 0.0 for old in self.loss_weights] != [new > 0.0 for new in loss_weights]:
            return None  # other components are inactive
        # Scales times loss weights stay, so that gradients are stored as before. None: inactive.
        moves = [old / new if new else None for old, new in zip(self.loss_weights, loss_weights)]
        # Alphas are ratios of arrays' scales. Weights of scalars may move otherwise: that of the loss is 1.
        scalars = self.components.scalar_components
        of_arrays = {move for i, move in enumerate(moves) if move is not None and i not in scalars}
        if len(of_arrays) != 1:
            return None
        (common,) = of_arrays
        # Inactive components move with the others, as their layers keep an alpha of 1.
        scales = [s * (common if move is None else move) for s, move in zip(self.component_scales, moves)]
        if within_float32(min(scales)) != min(scales) or max(scales) > within_float32(max_scale):
            return None
        return replace(self, component_scales=scales, loss_weights=loss_weights)

    @cached_property
    def arriving(self) -> Mapping[int, float]:
        """Scale of each gradient, by position, when all functions have contributed to it, before `steps`
        multiply it: its component's, except for float32 scalars.
        """
        scales = {position: self.component_scales[index] for position, index in self.components.of.items()}
        # A float32 scalar takes the lowest scale of its function's inputs, within `_FLOAT_FACTOR` of its own,
        # so that this input's gradient need not be multiplied; in forward order, as chains hand it on.
        for node in reversed(self.nodes) if self.float_functions else ():
            if node.number in self.float_functions and node.inputs:
                scale, of_inputs = scales[node.outputs[0]], min(scales[position] for position in node.inputs)
                scales[node.outputs[0]] = min(max(of_inputs, scale / _FLOAT_FACTOR), scale * _FLOAT_FACTOR)
        return scales

    @cached_property
    def scales(self) -> Mapping[int, float]:
        """Final scale of each gradient, by position: the arriving one, or that to which `steps` bring it."""
        scales = {**self.arriving}
        for node in self.nodes:
            if node.separates:
                # A leaf's gradient is kept in an array of its own, which stays at the scale of its function.
                leaves = [one.input for one in node.layer_inputs if one.to_leaf]
                scales.update(dict.fromkeys((*node.outputs, *leaves), self._running_scale(node)))
        return scales

    def _running_scale(self, node: NodeStructure) -> float:
        """Scale at which a function that separates components reads its output gradient."""
        if not node.linear:
            return 1.0  # such as a clipping function, which compares gradients with a constant
        # Multiplying its scalar output costs less than multiplying an array. So it is lowered to the scale of
        # the first input; but not raised, as at a higher scale 16 bits may not hold it.
        return min([self.arriving[position] for position in (*node.outputs[:1], *node.inputs[:1])])

    @cached_property
    def steps(self) -> Mapping[int, Step]:
        """Steps by number of the function; functions that only pass a scale on have none."""
        steps: Dict[int, Step] = {}
        arriving = self.arriving
        reached: Set[int] = set()  # gradients to which a function has contributed already
        for node in self.nodes:
            scale = self.scales[node.outputs[0]]
            if node.separates:
                # Outputs, except those that backward starts from, and inputs to which others have contributed
                # are rescaled to the scale at which it runs. Afterwards all inputs get their own scales.
                outputs = node.outputs if node is not self.nodes[0] else ()
                rescaled, restored = [*outputs, *(p for p in node.inputs if p in reached)], node.inputs
                alphas = [1.0] * len(node.layer_inputs)
            else:
                rescaled, restored = [], ()
                # An input that needs no gradient has no scale: its alpha is 1.
                alphas = [arriving.get(one.input, scale) / scale for one in node.layer_inputs]
            before = [Rescale(p, scale / arriving[p]) for p in rescaled if arriving[p] != scale]
            after = [Rescale(p, arriving[p] / scale) for p in restored if arriving[p] != scale]
            if node.leaves or node.layer_inputs or before or after:
                steps[node.number] = Step(tuple(before), scale, tuple(alphas), tuple(after))
            reached.update(node.inputs)
        return steps

    @cached_property
    def layers(self) -> Dict[str, Tuple[float, float]]:
        """By layer, in backward order: scale of its output gradient, and its alpha."""
        return {
            one.layer: (self.steps[node.number].scale, alpha)
            for node in self.nodes
            if node.layer_inputs
            for one, alpha in zip(node.layer_inputs, self.steps[node.number].alphas)
        }
