# SPDX-License-Identifier: Apache-2.0
"""Schedule of a backward pass: a scale per component, and steps around functions."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Dict, FrozenSet, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from .components import Components, NodeStructure
from .layer_record import Reason
from .power_of_two import within_float32

# Factor by which the scale of a float32 scalar may differ from that of its component, at which it fits in 16
# bits. So it fits in float32; and so does the factor between a scalar moved up and another moved down.
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
    is_merged: bool = False  # True if components share scales because only hooks could split them
    # Float32 functions whose scalar output's float32 gradient may leave its component's scale (`arriving`).
    float_functions: FrozenSet[int] = frozenset()

    @cached_property
    def seed_scale(self) -> float:
        """Scale of the seed gradient."""
        return self.scales[self.nodes[0].outputs[0]]

    @cached_property
    def loss_scale(self) -> float:
        """Reported S0: the root's scale; if measured, that of the first active component after scalars."""
        components = self.components
        # A measured scale of a scalar root is the largest that its format allows, whatever the network.
        for edge in components.edges if self.given_scale is None else ():
            leaves_scalars = edge.predecessor in components.at_loss and edge.layer is None
            to_array = edge.successor not in components.scalar_components
            if leaves_scalars and to_array and self.loss_weights[edge.successor]:
                return self.component_scales[edge.successor]
        return self.component_scales[components.root]

    def loss_weight_of(self, position: int) -> float:
        """Loss weight of a gradient that is not a leaf's."""
        return self.loss_weights[self.components.of[position]]

    def moved_to(self, loss_weights: Tuple[float, ...], max_scale: float) -> Optional[ScaleSchedule]:
        """Move scales against their loss weights, so that gradients are stored as before, or return None if
        alphas would change or a scale would leave the range up to `max_scale`.
        """
        if [old > 0.0 for old in self.loss_weights] != [new > 0.0 for new in loss_weights]:
            return None  # other components are inactive
        moves = [old / new if new else None for old, new in zip(self.loss_weights, loss_weights)]
        # An alpha is the ratio of two arrays' scales: it stays if all arrays move by one factor. Weights of
        # scalars may move by others: that of the loss is always 1.
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
        """Scale of each gradient, by position, when all functions have contributed to it and `steps` have not
        multiplied it yet: its component's, except for float32 scalars.
        """
        scales = {position: self.component_scales[index] for position, index in self.components.of.items()}
        # A float32 scalar takes the lowest scale of its function's inputs, so that this input's gradient need
        # not be multiplied. In forward order: the inputs may be such scalars themselves.
        for node in reversed(self.nodes):
            if node.number in self.float_functions and node.inputs:
                own, lowest_input = scales[node.outputs[0]], min([scales[p] for p in node.inputs])
                scales[node.outputs[0]] = min(max(lowest_input, own / _FLOAT_FACTOR), own * _FLOAT_FACTOR)
        return scales

    @cached_property
    def scales(self) -> Mapping[int, float]:
        """Final scale of each gradient, by position: the arriving one, or that to which `steps` bring it."""
        scales = {**self.arriving}
        for node in self.nodes:
            if node.separates:
                scale = 1.0  # not linear, such as a clipping function, which compares with a constant
                if node.linear:
                    # Bringing its scalar output to the scale of the first input costs less than multiplying
                    # that array. But it is only lowered: 16 bits may not hold it at a higher scale.
                    scale = min([self.arriving[p] for p in (*node.outputs[:1], *node.inputs[:1])])
                # Its contribution to a leaf is in an array of its own, which nothing multiplies afterwards.
                leaves = [one.input for one in node.layer_inputs if one.to_leaf]
                scales.update(dict.fromkeys((*node.outputs, *leaves), scale))
        return scales

    @cached_property
    def steps(self) -> Mapping[int, Step]:
        """Steps by number of the function; functions that only pass a scale on have none."""
        steps: Dict[int, Step] = {}
        arriving = self.arriving
        reached: Set[int] = set()  # gradients to which a function has contributed already
        for node in self.nodes:
            scale, rescaled = self.scales[node.outputs[0]], []
            if node.separates:
                rescaled = [p for p in (*node.outputs, *node.inputs) if arriving[p] != scale]
                alphas = [1.0] * len(node.layer_inputs)
            else:
                # Where layers do not scale, a leaf has no component: its alpha is 1.
                alphas = [arriving.get(one.input, scale) / scale for one in node.layer_inputs]
            # What it reads or adds to is brought to the scale at which it runs, and its inputs back after it.
            # The seed gradient, to which no function contributes, has that scale already.
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
