# SPDX-License-Identifier: Apache-2.0
"""Schedule of a backward pass: a scale per component, and steps around functions."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Dict, FrozenSet, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from .choose import within_float32
from .components import Components, MergedComponents, NodeStructure
from .layer_record import Reason

# The scale of a float32 scalar may differ from that of its component by this factor. 16 bits hold the element
# at the component's scale, so that the factor between two such scales fits float32.
_FLOAT_FACTOR = 2.0**60


class Rescale(NamedTuple):
    """Gradient that is multiplied in place, between two functions."""

    position: int
    factor: float


class Step(NamedTuple):
    """Work around the backward of one function."""

    before: Tuple[Rescale, ...]  # before it runs
    scale: float  # scale of its contributions, except those with an alpha
    alphas: Tuple[float, ...]  # of its layers, in the order of `NodeStructure.layer_inputs`
    after: Tuple[Rescale, ...] = ()  # after it has run

    def input_scales(self, node: NodeStructure) -> Dict[int, float]:
        """Scales of the input gradients of the layers of `node`, by position."""
        return {one.input: self.scale * alpha for one, alpha in zip(node.layer_inputs, self.alphas)}


@dataclass(frozen=True)
class ScaleSchedule:
    """Scales of one pass, for any graph of the same topology."""

    nodes: Sequence[NodeStructure]  # in backward order
    components: Components
    component_scales: Sequence[float]
    given_scale: Optional[float]  # S0, where it was given; None: it was measured
    loss_weights: Tuple[float, ...]  # loss weight of each component for which it was chosen
    reasons: Mapping[str, Reason] = field(default_factory=dict)  # reason of alpha, by layer
    unbounded: Mapping[str, float] = field(default_factory=dict)  # result of the method, by layer
    merged: Optional[MergedComponents] = None  # merged components; None: none had to share a scale
    # Scalar functions that receive and pass on gradients in float32.
    float_functions: FrozenSet[int] = frozenset()

    @cached_property
    def seed_scale(self) -> float:
        """Scale of the seed gradient."""
        return self.scales[self.nodes[0].outputs[0]]

    @cached_property
    def loss_scale(self) -> float:
        """S0; if measured, the scale after the scalar functions at the loss."""
        scalars, at_loss = self.components.scalar_components, self.components.at_loss
        if self.given_scale is None:
            for edge in self.components.edges:
                at_the_loss = edge.layer is None and edge.predecessor in at_loss
                if at_the_loss and edge.successor not in scalars and self.loss_weights[edge.successor]:
                    return self.component_scales[edge.successor]
        return self.component_scales[self.components.root]

    def loss_weight_of(self, position: int) -> float:
        """Loss weight of a gradient."""
        index = self.components.of.get(position)
        return 1.0 if index is None else self.loss_weights[index]

    def moved_to(self, weights: Tuple[float, ...], max_scale: float) -> Optional[ScaleSchedule]:
        """Schedule with the same alphas, if all loss weights moved by one power of two; else None."""
        if [old > 0.0 for old in self.loss_weights] != [new > 0.0 for new in weights]:
            return None
        factors = [old / new if new else None for old, new in zip(self.loss_weights, weights)]
        scalars = self.components.scalar_components
        # Weights of scalars may stay, as that of the loss, which is 1.
        moves = {move for index, move in enumerate(factors) if move is not None and index not in scalars}
        if len(moves) != 1:
            return None
        (common,) = moves
        # Inactive components move with the others.
        scales = [s * (common if move is None else move) for s, move in zip(self.component_scales, factors)]
        if within_float32(min(scales)) != min(scales) or max(scales) > max_scale:
            return None
        return replace(self, component_scales=scales, loss_weights=weights)

    def is_applied_as(self, other: ScaleSchedule) -> bool:
        """True if another schedule of the same topology results in the same pass."""
        return self.component_scales == other.component_scales

    @cached_property
    def arriving(self) -> Mapping[int, float]:
        """Scale of each completely accumulated gradient, by position, before the rescales of `steps`."""
        # Float32 scalars have the scale of their successors, without a multiplication in between.
        scales = {position: self.component_scales[index] for position, index in self.components.of.items()}
        for node in reversed(self.nodes) if self.float_functions else ():
            if node.number in self.float_functions and node.inputs:
                own, of_inputs = scales[node.outputs[0]], min(scales[position] for position in node.inputs)
                scales[node.outputs[0]] = min(max(of_inputs, own / _FLOAT_FACTOR), own * _FLOAT_FACTOR)
        return scales

    @cached_property
    def _steps(self) -> Tuple[Dict[int, Step], Dict[int, float]]:
        """Steps by number of the function, and final scales of gradients by position."""
        scales, steps = {**self.arriving}, {}
        # Gradients to which a function has contributed already.
        reached: Set[int] = set()
        for node in self.nodes:
            if node.separates:
                step = _boundary(node, scales, reached, first=node is self.nodes[0])
                if node.leaves or node.layer_inputs or step.before or step.after:
                    steps[node.number] = step
                # Outputs have been rescaled in place. A leaf's gradient is kept in an array of its own, which
                # stays at this scale.
                leaves = [one.input for one in node.layer_inputs if one.to_leaf]
                scales.update(dict.fromkeys((*node.outputs, *leaves), step.scale))
            elif node.leaves or node.layer_inputs:
                scale = scales[node.outputs[0]]
                # An input that needs no gradient has no scale: its alpha is 1.
                alphas = tuple([self.arriving.get(one.input, scale) / scale for one in node.layer_inputs])
                steps[node.number] = Step((), scale, alphas)
            reached.update(node.inputs)
        return steps, scales

    @property
    def steps(self) -> Mapping[int, Step]:
        """Steps by number of the function; functions that only pass a scale on have none."""
        return self._steps[0]

    @cached_property
    def scales(self) -> Mapping[int, float]:
        """Final scale of each gradient, by position."""
        return self._steps[1]

    @cached_property
    def layers(self) -> Dict[str, Tuple[float, float]]:
        """Scale of the output gradient, and alpha, of each layer, in backward order."""
        return {
            one.layer: (step.scale, alpha)
            for node in self.nodes
            for step in [self.steps.get(node.number)]
            if step is not None
            for one, alpha in zip(node.layer_inputs, step.alphas)
        }


def _boundary(node: NodeStructure, scales: Mapping[int, float], reached: Set[int], *, first: bool) -> Step:
    """Rescale around a function, not a layer, whose inputs and outputs have different scales."""
    # The function runs at one scale, `inside`: the lower one of its output and its first input, as a scalar
    # output may be stored in 16 bits. Outputs are rescaled to it before, each input to its own afterwards.
    own, of_inputs = scales[node.outputs[0]], [scales[p] for p in node.inputs]
    if not node.linear:
        inside = 1.0  # it receives unscaled gradients
    elif not of_inputs:
        inside = own
    else:
        inside = min(of_inputs[0], own)
    # Contributions of other branches to its inputs carry the inputs' scale already.
    arrived = [(p, scale) for p, scale in zip(node.inputs, of_inputs) if p in reached]
    outputs = [(p, scales[p]) for p in node.outputs if not first]  # those of the first have it already
    before = [Rescale(p, inside / scale) for p, scale in (*outputs, *arrived) if scale != inside]
    after = [Rescale(p, scale / inside) for p, scale in zip(node.inputs, of_inputs) if scale != inside]
    return Step(tuple(before), inside, (1.0,) * len(node.layer_inputs), tuple(after))
