# SPDX-License-Identifier: Apache-2.0
"""Functions at which the gradient ends though the loss is not zero."""

from __future__ import annotations

import math
from typing import AbstractSet, Any, Dict, Iterator, List, Mapping, Sequence, Set, Tuple

import nnabla as nn

from ..core.components import NodeStructure
from ..graph.functions import is_matrix_product
from .finite import Cause, factors_in_words
from .target import Network
from .watching import Sight

# More than this share of an activation's outputs are where it is flat, in every batch.
_MOST = 0.5

_SMALLER = "make what it reads smaller, by a normalization or a factor before it"

# They stop the gradient on purpose.
_STOPS = {"Unlink", "Sink"}
_RECTIFIERS = {"ReLU", "ReLU6", "CReLU"}
_SATURATES = {"Sigmoid", "Tanh", "Softmax", "HardTanh", "HardSigmoid", "MinimumScalar", "MaximumScalar"}
_PRODUCTS = {"Mul2", "Div2"}
_NORMALIZED = ("Batch", "FusedBatch", "SyncBatch", "Layer", "Instance", "Group")
_NORMALIZATIONS = {f"{kind}Normalization" for kind in _NORMALIZED}


class Ends:
    """Search for ends of the gradient in the backward passes of all batches."""

    def __init__(self, network: Network, sights: Sequence[Sight]) -> None:
        self._network, self._sights = network, sights
        # Keys of the leaves that get no gradient in any batch.
        starved = [p for p in network.plan.leaves if not self._largest_gradient(sights, [p])]
        self._starved = set(network.keys(starved))

    def functions(self) -> Dict[int, Cause]:
        """The functions that get a gradient and hand on nothing but zeros, by key, in forward order."""
        found: Dict[int, Cause] = {}
        for key, node in reversed(self._network.nodes.items()):
            arriving = [s for s in self._sights if self._largest_gradient([s], node.outputs)]
            handed_on = node.inputs or node.leaves
            if not arriving or not handed_on or self._largest_gradient(arriving, handed_on):
                continue
            # A layer that starts from 0, and learns, is none.
            weights = [p for p in node.leaves if self._network.graph.leaves[p].ndim > 1]
            if node.type_name in _STOPS or self._largest_gradient(arriving, weights):
                continue
            f = self._network.function(key)
            before = self._leaves_before(f)
            # Where others bring a gradient to all that it depends on, it is nobody's fault.
            if before.isdisjoint(self._starved):
                continue
            kind, what, remedy = self._told(f, node)
            if kind == "zero_factor" or not self._nothing_to_learn(f):
                # A layer that gets a gradient by another way may mend it.
                found[key] = Cause(kind, node.label, what, remedy, before <= self._starved)
        return found

    def saturated(self) -> Iterator[Cause]:
        """The activations most of whose outputs are where they are flat, and that get a gradient."""
        keys = {key for sight in self._sights for key in sight.flat}
        shares = {key: min(sight.flat.get(key, 0.0) for sight in self._sights) for key in keys}
        flat = {key: share for key, share in shares.items() if share > _MOST}
        others, nodes = self._leaves_without(flat.keys()), self._network.nodes
        for key in reversed([key for key, node in nodes.items() if key in flat and not node.loss_section]):
            # In a loss, an output may well be sure; and what gets its gradient by another way does learn.
            node, before = nodes[key], self._leaves_before(self._network.function(key))
            if not before <= others and self._largest_gradient(self._sights, node.outputs):
                what = "outputs are where its derivative is next to 0"
                if node.type_name == "Softmax":
                    what = "rows are 1 in one place and 0 elsewhere"
                what = f"it is saturated: {flat[key]:.0%} of its {what}"
                alone = {self._network.graph.positions[key] for key in before - others}
                spoils = [n.label for n in reversed(nodes.values()) if not alone.isdisjoint(n.leaves)]
                yield Cause("saturated", node.label, what, _SMALLER, before <= self._starved, tuple(spoils))

    def _largest_gradient(self, sights: Sequence[Sight], positions: Sequence[int]) -> float:
        """The largest magnitude in variables; infinite where something is not finite."""
        keys = self._network.keys(positions)
        known = [s.gradients[k] for s in sights for k in keys if k in s.gradients]
        return max((math.inf if one.nonfinite else one.abs_max for one in known), default=0.0)

    def _largest(self, v: nn.Variable) -> float:
        known = (s.data.get(hash(v)) for s in self._sights)
        return max((math.inf if one is None else one.abs_max for one in known), default=math.inf)

    def _nothing_to_learn(self, f: Any) -> bool:
        """Whether a function contributes 0 to the loss: a margin is kept, no label counts."""
        behind = (v for g in self._network.behind(map(hash, f.outputs)) for v in g.outputs if v.size == 1)
        first = next(behind, None)
        return first is not None and not self._largest(first)

    def _leaves_before(self, f: Any) -> Set[int]:
        """Keys of the leaves that need a gradient and that `f` depends on."""
        return {hash(v) for g in self._network.walk([f]) for v in g.inputs} & self._network.leaves.keys()

    def _leaves_without(self, functions: AbstractSet[int]) -> Set[int]:
        """Keys of the leaves that a gradient reaches without passing any of these functions."""

        def onward(f: Any) -> List[nn.Variable]:
            return [] if hash(f) in functions else [v for v in f.inputs if v.need_grad]

        walked = self._network.walk(self._network.last, onward)
        return {hash(v) for f in walked if hash(f) not in functions for v in f.inputs if v.parent is None}

    def _told(self, f: Any, node: NodeStructure) -> Tuple[str, str, str]:
        """The kind, what is wrong, and a remedy."""
        kind, args, name = node.type_name, node.args, self._network.called
        zeros = [v for v in f.inputs if not self._largest(v)]
        if kind in _RECTIFIERS and not any(map(self._largest, f.outputs)):
            remedy = "start again with biases of 0, or use F.leaky_relu"
            return "dead_relu", "it is dead: every output is 0 in every batch", remedy
        if kind == "Dropout":
            return "zero_factor", f"it drops everything (p={args['p']:g})", "lower p: it is the share dropped"
        if kind == "MulScalar" and not args["val"]:
            return "zero_factor", "it multiplies by 0", "use another factor, or leave this part out"
        if kind == "MulScalar":
            arriving = self._largest_gradient(self._sights, node.outputs)
            what = f"it multiplies the gradient, which is {arriving:.1g}, by {args['val']:g}, which gives 0"
            what += factors_in_words(self._network, list(self._network.behind(map(hash, f.outputs))))
            return "small_factors", what, "take factors out; a solver takes them into the learning rate"
        weights = [v for v in zeros if hash(v) in self._network.names and v.ndim > 1]
        if is_matrix_product(kind) and node.leaves and weights:
            what = f"its weights are all 0 and get no gradient ({name(weights[0])})"
            return "zero_weights", what, "initialise them randomly"
        if (kind in _PRODUCTS or is_matrix_product(kind)) and zeros:
            return "zero_factor", f"it multiplies by {name(zeros[0])}, which is all 0", "check why that is 0"
        if kind in ("Softmax", "LogSoftmax") and f.inputs[0].shape[args["axis"]] == 1:
            what = "it runs over an axis of size 1, so that all its outputs are the same"
            return "constant_softmax", what, "choose the axis of the places that it weighs"
        if kind in _NORMALIZATIONS:
            gammas = [v for v in zeros if name(v).endswith("gamma")]
            if gammas:
                return "zero_factor", f"it multiplies by {name(gammas[0])}, which is all 0", "start it from 1"
            what = "it passes no gradient: what it normalises together is constant, or one number"
            return "constant_input", what, "check what it reads; feed larger batches or maps"
        if kind in _SATURATES:
            what = "it is saturated: all of its outputs are where its derivative is 0"
            return "saturated", what, _SMALLER
        what, remedy = "it passes no gradient on", "check whether it masks everything or has no derivative"
        return "no_gradient", what, remedy


def ends_as_stored(network: Network, stored: Ends, ended: Mapping[int, Cause]) -> Iterator[Cause]:
    """The functions at which the gradient ends as stored, and not in fp32, in forward order."""
    for key, cause in stored.functions().items():
        if key not in ended:
            format = network.format(network.function(key).outputs[0]).name
            what = f"{cause.what}, as stored in {format}, not in fp32"
            yield cause._replace(kind=f"{cause.kind}_as_stored", what=what)
