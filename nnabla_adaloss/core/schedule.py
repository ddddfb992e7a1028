# SPDX-License-Identifier: Apache-2.0
"""Schedule of a backward pass: a scale per component, and steps around functions."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Dict, FrozenSet, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from .components import Components, NodeStructure
from .layer_record import Reason
from .power_of_two import within_float32

# Factor by which a float32 scalar's scale may differ from its component's. At the component's it fits in 16
# bits, so that it still fits in float32; and so does the largest factor between two such scales, 2**120.
_FLOAT_FACTOR = 2.0**60


class Rescale(NamedTuple):
    """Multiplication of a gradient in place, between the backwards of two functions."""

    position: int  # of the variable
    factor: float


class Step(NamedTuple):
    """Work around the backward of one function."""

    before: Tuple[Rescale, ...]  # before it runs
    scale: float  # of the gradients that it reads and writes; of scaled inputs times alpha
    alphas: Tuple[float, ...]  # of scaled inputs, in the order of `NodeStructure.layer_inputs`
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
    unbounded_alphas: Mapping[str, float] = field(default_factory=dict)  # of methods, before bounds, by layer
    is_merged: bool = False  # True if components share scales because only hooks could split them
    # Float32 scalars with scales of their own, by the function that computes each: see `arriving_scales`.
    float_scalars: FrozenSet[int] = frozenset()

    @cached_property
    def seed_scale(self) -> float:
        """Scale of the seed gradient, which the first function of backward reads."""
        return self.scales[self.nodes[0].outputs[0]]

    @cached_property
    def loss_scale(self) -> float:
        """S0 for reports: the root's scale; if measured, that of the first active arrays at the loss."""
        components = self.components
        # Measured, the scale of a scalar root is the largest of its format in every network: it would say
        # nothing about this one's gradients.
        for edge in components.edges if self.given_scale is None else ():
            is_at_loss = edge.predecessor in components.at_loss and edge.layer is None
            to_arrays = edge.successor not in components.scalar_components
            if is_at_loss and to_arrays and self.loss_weights[edge.successor]:
                return self.component_scales[edge.successor]
        return self.component_scales[components.root]

    def loss_weight_of(self, position: int) -> float:
        """Loss weight of a gradient that is not a leaf's."""
        return self.loss_weights[self.components.of[position]]

    def with_loss_weights(self, loss_weights: Tuple[float, ...], max_scale: float) -> Optional[ScaleSchedule]:
        """Convert to other loss weights: a gradient twice as large gets half the scale. None if alphas would
        change, or a scale would leave the range of float32 or exceed `max_scale`.
        """
        if [old > 0.0 for old in self.loss_weights] != [new > 0.0 for new in loss_weights]:
            return None  # inactive components have no scale of their own to convert
        moves = [old / new if new else None for old, new in zip(self.loss_weights, loss_weights)]
        # Alphas stay if the scales around layers, and of all arrays, move by one factor. A larger alpha might
        # make a weight infinite. Other scalars may move otherwise: the loss, for one, never moves.
        around_layers = {i for edge in self.components.edges if edge.layer is not None for i in edge[:2]}
        others = self.components.scalar_components - around_layers
        joint_moves = {move for i, move in enumerate(moves) if move is not None and i not in others}
        if len(joint_moves) != 1:
            return None
        (common,) = joint_moves
        # Inactive components move with the others: the alphas of their layers stay, too.
        scales = [s * (common if move is None else move) for s, move in zip(self.component_scales, moves)]
        if within_float32(min(scales)) != min(scales) or max(scales) > within_float32(max_scale):
            return None
        return replace(self, component_scales=scales, loss_weights=loss_weights)

    @cached_property
    def arriving_scales(self) -> Mapping[int, float]:
        """Scale of each gradient before `steps`, by position: its component's, except for float32 scalars."""
        scales = {position: self.component_scales[index] for position, index in self.components.of.items()}
        # A float32 scalar takes the lowest scale of its function's inputs: at another, that input's gradient,
        # often an array, would be multiplied later. In forward order, as an input may be such a scalar.
        for node in reversed(self.nodes):
            if node.number in self.float_scalars and node.inputs:
                own, lowest_input = scales[node.outputs[0]], min([scales[p] for p in node.inputs])
                scales[node.outputs[0]] = min(max(lowest_input, own / _FLOAT_FACTOR), own * _FLOAT_FACTOR)
        return scales

    @cached_property
    def scales(self) -> Mapping[int, float]:
        """Scale at which each gradient is read, by position: that on arrival, or as `steps` multiply it."""
        arriving, scales = self.arriving_scales, {**self.arriving_scales}
        for node in self.nodes:
            if node.separates:
                scale = 1.0  # not linear: a clipping function compares the gradient with a constant
                if node.linear:
                    # A scalar at the loss is brought to the scale of the first input: multiplying that array
                    # would cost more. It is only lowered: at a higher scale it might overflow in 16 bits.
                    scale = min([arriving[p] for p in (*node.outputs[:1], *node.inputs[:1])])
                # A scaled input that is a leaf gets this scale, too: `steps` do not multiply leaves.
                leaves = [one.input for one in node.layer_inputs if one.to_leaf]
                scales.update(dict.fromkeys((*node.outputs, *leaves), scale))
        return scales

    @cached_property
    def steps(self) -> Mapping[int, Step]:
        """Steps by number of the function; functions that only pass a scale on have none."""
        steps: Dict[int, Step] = {}
        arriving = self.arriving_scales
        reached: Set[int] = set()  # gradients to which a function has contributed already
        for node in self.nodes:
            scale, rescaled = self.scales[node.outputs[0]], []
            if node.separates:
                rescaled = [p for p in (*node.outputs, *node.inputs) if arriving[p] != scale]
                alphas = [1.0] * len(node.layer_inputs)
            else:
                # If layers do not scale (`by_layer=False`), a leaf has no component: its alpha is 1.
                alphas = [arriving.get(one.input, scale) / scale for one in node.layer_inputs]
            # Gradients to which others have added need `scale` before the function reads or adds to them; the
            # seed has it from the start. Afterwards inputs return to their own scale, at which others add.
            before = tuple([Rescale(p, scale / arriving[p]) for p in rescaled if p in reached])
            after = tuple([Rescale(p, arriving[p] / scale) for p in rescaled if p in node.inputs])
            if node.leaves or node.layer_inputs or before or after:
                steps[node.number] = Step(before, scale, tuple(alphas), after)
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
