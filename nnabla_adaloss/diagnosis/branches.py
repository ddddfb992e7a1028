# SPDX-License-Identifier: Apache-2.0
"""Branches and units that get no gradient in these batches, or a small one, without a fault in backward."""

from __future__ import annotations

import math
from typing import AbstractSet, Any, Dict, Iterable, Iterator, List, Sequence, Tuple

import nnabla as nn
import numpy as np
from numpy.typing import NDArray

from . import remedies
from .causes import Cause, Note
from .network import Network
from .operands import Batches
from .passes import Gradients, Layer
from .target import input_name
from .watching import Sight

_SHRINKS = 1e3  # a function that makes a gradient smaller by this factor is named
_UNKNOWN = "", remedies.NOT_CHOSEN  # clause and remedy where the reason is unknown


class Branches(Batches):
    """Search for layers without a gradient, and for the functions that leave them out, over all batches."""

    def __init__(self, network: Network, sights: Sequence[Sight]) -> None:
        super().__init__(network, sights)
        # The output axis of a gradient penalty's backward products is that of a layer's inputs.
        self._products = [f for f in network.weighted if not f.info.type_name.endswith("Grad")]
        # Units that get a gradient, by weight, as several products may share one.
        self._reached: Dict[int, NDArray[np.bool_]] = {}

    def waits_for(self, layer: Layer) -> str:
        """Parameter, if any, that is 0 and keeps a layer from learning until it has moved, as in LoRA."""
        network, open_ways = self._network, set(layer.outputs or layer.weights)
        names: List[str] = []
        for f in network.graph.functions:
            if not open_ways.isdisjoint(map(hash, f.inputs)):
                factors = [v for v in self.zero_factors(f) if hash(v) not in open_ways and self._moves(v)]
                found = network.parameters(filter(self._moves, map(self.zero_origin, factors)))
                names += found
                open_ways.update(map(hash, () if found else f.outputs))
        return names[0] if names and open_ways.isdisjoint(map(hash, network.roots)) else ""

    def _moves(self, v: nn.Variable) -> bool:
        return self.gradient([hash(v)]) > 0.0

    def blank_inputs(self) -> Iterator[Note]:
        """Note layers that learn nothing from inputs of zeros, and PReLUs from those without negatives."""
        network = self._network
        for f, node in network.nodes.items():
            weights = [key for key in node.leaves if network.leaves[key].ndim > 1]
            arriving = self.arriving(f)
            if node.type_name == "PReLU" and node.leaves and arriving and not self.gradient(node.leaves):
                what = "reads no numbers below 0 in these batches, so that its slope learns nothing"
                yield Note(f"{node.label} {what}: leave out a ReLU before it.")
            if weights and arriving and not self.gradient(weights):
                v = self.zero_origin(f.inputs[0])
                is_filled = network.is_input(v) and hash(v) not in network.never_filled
                if is_filled and not self.largest(v):
                    what = f"learns nothing from {input_name(v)}, which is all 0 in every batch"
                    yield Note(f"{node.label} {what}.")

    def blocked(self, layers: Iterable[Layer]) -> Iterator[Note]:
        """Note layers that get no gradient through some function, such as a minimum of other numbers."""
        network, sights = self._network, self._sights
        names: List[str] = []
        ends: List[Any] = []
        for layer in layers:
            is_cut_off = network.reached.isdisjoint(v.parent for v in layer.outputs.values())
            onward = (f for f in network.behind(layer.outputs) if f in network.nodes)
            has_gradient = self.gradient((*layer.outputs, *layer.weights))
            f = None if is_cut_off or has_gradient else next(filter(self.arriving, onward), None)
            if f is not None:
                names.append(layer.name)
                # A concatenation hands on all; the functions that read it slice a part off.
                is_joint = remedies.is_a(f, "Concatenate", "Stack")
                ends += network.readers[hash(f.outputs[0])] if is_joint else [f]
        if names:
            batches = f"{len(sights)} batch{'es' * (len(sights) > 1)}"
            # Several functions may each have a reason of their own.
            clause, remedy = self._why_blocked(ends[0]) if len({*ends}) == 1 else _UNKNOWN
            end = f" in {batches}: none passes {network.listed(ends)}{clause}. "
            yield Note("No gradient gets to ", names, f"{end}Unless other batches reach them, {remedy}.")

    def _why_blocked(self, f: Any) -> Tuple[str, str]:
        """Clause that tells why a function hands on no gradient, and a remedy."""
        network, zeros = self._network, self.zero_factors(f)
        if zeros:
            remedy = remedies.ZEROS if network.is_input(zeros[0]) else remedies.WHY_ZERO
            return f", which multiplies by {network.called(zeros[0])}, all 0", remedy
        if (g := next(filter(self.is_disjoint, network.behind(map(hash, f.outputs))), None)) is not None:
            return f", and {network.name(g)} multiplies the others by 0", remedies.CHECK_MASK_AND_LABELS
        if remedies.is_a(f, "EpsilonInsensitiveLoss"):
            return "", remedies.SMALLER_MARGIN
        growth = self._first.grown(f)
        return (growth.clause, growth.remedy) if growth.remedy in remedies.SHIFTS else _UNKNOWN

    def clipped(self) -> Iterator[Cause]:
        """Functions that clip gradients to next to nothing."""
        for f, node in self._network.nodes.items():
            left, arriving = self.gradient(node.inputs), self.arriving(f)
            if node.type_name.startswith("ClipGrad") and _SHRINKS * left < arriving < math.inf and left:
                what = f"it leaves {left:.1e} of a gradient of {arriving:.1e}"
                yield Cause("clipped", node.label, what, remedies.CLIP_LESS, False)

    def shrinking(self, name: str) -> Tuple[str, str]:
        """Clause about the function or operands that make a layer's gradient far smaller, and a remedy."""
        network, most, found = self._network, _SHRINKS, ("", "")
        layer = network.graph.functions[network.positions[name]]
        onward = set(map(hash, layer.outputs))
        for f in [f for f in network.behind(onward) if f in network.nodes]:
            left, arriving = self.gradient(onward.intersection(network.nodes[f].inputs)), self.arriving(f)
            onward.update(map(hash, f.outputs))
            if left and most * left < arriving < math.inf:
                most, clause, remedy = arriving / left, "", ""
                if f.info.type_name.startswith("ClipGrad"):
                    remedy = remedies.CLIP_LESS
                elif remedies.is_a(f, "MulScalar", "Mul2", "Div2") and f.outputs[0].size > 1:
                    remedy = remedies.LARGER_FACTOR
                # The derivatives of these are small because of their inputs.
                elif remedies.is_a(f, "Exp", "Sigmoid", "SoftPlus", "Tanh"):
                    growth = self._first.grown(f)
                    clause, remedy = growth.clause, growth.remedy or remedies.SATURATED
                found = f"; {network.listed([f])} leaves {left:.1e} of {arriving:.1e}{clause}", remedy
        if found[0]:
            return found
        reads, operands = layer.inputs[0], self._first
        if layer in network.products and self.largest(reads) < 1e-6:
            growth = operands.shrunk(reads.parent)
            clause = f"; it reads numbers up to {self.largest(reads):.1g}{growth.clause}"
            return clause, growth.remedy or remedies.LARGER_NUMBERS
        growth = operands.growth(operands.gradient_steps(layer), "gradients", shrinks=True)
        return (growth.clause, growth.remedy) if growth.remedy == remedies.VANISHING else found

    def add(self, gradients: Gradients) -> None:
        """Find the units that get a gradient in a batch."""
        for f in self._products:
            if (gradient := gradients.get(hash(f.outputs[0]))) is not None:
                axis, key = 1 if "onvolution" in f.info.type_name else -1, hash(f.inputs[1])
                by_unit = np.moveaxis(gradient, axis, -1).reshape(-1, gradient.shape[axis])
                self._reached[key] = np.any(by_unit, axis=0) | self._reached.get(key, False)

    def dead_units(self, accused: AbstractSet[str]) -> Iterator[Note]:
        """Note layers of which some units get no gradient, if no function near them is `accused`."""
        network, first = self._network, {hash(f.inputs[1]): f for f in reversed(self._products)}
        for f in network.in_order(first.values()):
            dead = ~self._reached.get(hash(f.inputs[1]), np.ones(1, bool))
            readers = network.readers.get(hash(f.outputs[0]), [])
            if dead.any() and not dead.all() and accused.isdisjoint(map(network.name, (f, *readers))):
                why, remedy = self._reason(f, readers, dead)
                # Pruned units have weights of 0 and a mask that leaves them out.
                behind = network.behind(map(hash, f.outputs))
                if remedy == remedies.INITIALISE and any(self._masks(g, dead) for g in behind):
                    continue
                # Some dead units are normal; many are noted even if nothing explains them.
                if remedy != remedies.NO_UNIT or np.mean(dead) >= 0.6:
                    end = f" learns nothing in {np.count_nonzero(dead)} of {dead.size} units, {why}. "
                    yield Note("", [network.name(f)], f"{end}{remedy[0].upper()}{remedy[1:]}.")

    def _masks(self, f: Any, dead: NDArray[np.bool_]) -> bool:
        """True for a product with constants, or data, that are 0 for these units."""
        others = [v for v in f.inputs if f.info.type_name == "Mul2" and not v.need_grad]
        known = [v.d for v in others if v.shape[-1:] == dead.shape and not v.data.clear_called]
        return any(not x[..., dead].any() for x in known)

    def _reason(self, f: Any, readers: Sequence[Any], dead: NDArray[np.bool_]) -> Tuple[str, str]:
        """Clause that tells why some units of a function get no gradient, and a remedy."""
        network = self._network
        if all(g.info.type_name == "Slice" for g in readers):
            return "which no function reads", remedies.CHECK_SLICES
        for g in (f, *readers):
            # A bias, or a normalization's beta, keeps these units below 0.
            for v in (v for v in g.inputs[1:] if hash(v) in network.names and v.size == dead.size):
                if v.d.flatten()[dead].max() < v.d.flatten()[~dead].min():
                    return f"as {network.called(v)} reaches {v.d.min():.3g} there", remedies.SMALLER_BIAS
        weights = f.inputs[1].d
        axes = [axis for axis, size in enumerate(weights.shape) if size == dead.size]
        if any(not np.moveaxis(weights, axis, 0)[dead].any() for axis in axes):
            return "whose weights are all 0", remedies.INITIALISE
        return "to which no gradient gets", remedies.NO_UNIT
