# SPDX-License-Identifier: Apache-2.0
"""Gradients that are 0 except for rounding errors, and the functions that make them so."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Sequence, Set, Tuple

import numpy as np
from numpy.typing import NDArray

from ..core.formats import Format
from ..emulation.format_emulation import FormatEmulation
from ..graph.loss import LossLike
from . import remedies
from .causes import Cause, listed
from .finite import SOFTMAX, SOFTMAX_OR_LOSS
from .network import NORMALIZATIONS, Network
from .operands import PRODUCTS
from .passes import Gradients, Layer, Passes, Tally
from .target import carried
from .untrained import alike_weights
from .watching import Sight, largest

# Gradients that change by this share when all is rounded to 21 bits consist of rounding errors: fp32 has only
# two bits more. Others change by some hundred thousandths, and so does the loss, unless the network amplifies
# rounding errors.
_FINER, _NOISE, _AMPLIFIED = Format.ieee("finer", exponent_bits=8, mantissa_bits=21), 0.25, 1e-4
_EXACT = Format.ieee("exact", exponent_bits=8, mantissa_bits=22)
_SUMS = {"Add2", "AddScalar", "AveragePooling", "GlobalAveragePooling", "Mean", "RSubScalar", "Sub2", "Sum"}
# Functions through which a shift of all numbers remains one.
_LINEAR = {*PRODUCTS, "Add2", "AddScalar", "Broadcast", "BroadcastTo", "MulScalar", "Reshape", "Transpose"}
# Functions that compare numbers, and so remove a shift of all.
_COMPARING = {*SOFTMAX_OR_LOSS, *NORMALIZATIONS}


class RoundingNoise:
    """Comparison of all batches in fp32 with numbers of 21 bits."""

    def __init__(self, network: Network, passes: Passes) -> None:
        self._network, self._passes, self._layers = network, passes, passes.layers
        self._loss = loss = network.examined.loss
        self._finer = FormatEmulation(loss, _FINER)
        # Forward overwrites a carried state before backward reads it; an emulation restores what was read.
        self.exact: LossLike = FormatEmulation(loss, _EXACT) if carried(network.graph) else loss
        self._finely = Tally(key for layer in self._layers for key in layer.weights)
        self._amplifies = False
        self.gradients: Set[int] = set()  # parameters whose gradients are rounding errors, after all batches
        self._sights: Sequence[Sight] = ()
        self.functions: List[Any] = []  # functions on the gradient's way whose numbers are rounding errors

    def compare_forward(self, in_fp32: Sight) -> None:
        """Find the functions in the first batch."""
        network, finely = self._network, Sight(self._network, in_fp32)
        network.examined.forward(self._finer, 0, finely.after_forward)
        # Where errors of 21 bits are as large as the numbers, those of fp32 are a quarter of these.
        origins = finely.origins_of_errors(_NOISE / 100.0, 0.7)
        sums = (f for f in origins if remedies.is_a(f, *_SUMS, *NORMALIZATIONS))
        self.functions = [f for f in sums if f in network.nodes and not network.is_copy(f)]

    def compare(self, index: int, in_fp32: Gradients, loss: float) -> None:
        """Compare the gradients of a batch."""
        self._finely.add(self._passes.with_one_scale(self._finer, index), in_fp32)
        self._amplifies |= abs(float(self._loss.d) - loss) > _AMPLIFIED * abs(loss)

    def end(self, sights: Sequence[Sight]) -> None:
        """Find the gradients, after all batches."""
        self._sights, self.gradients = sights, self._finely.zeros()
        if not self._amplifies:
            self.gradients |= self._finely.differing(_NOISE)
        # A bias beside weights of rounding errors has such errors, too, even if both passes agree by chance;
        # unless its gradient is much larger.
        for layer in self._layers:
            sizes = {key: largest(s.gradients.get(key) for s in sights) for key in layer.weights}
            of_weights = {key: sizes[key] for key, v in layer.weights.items() if v.ndim > 1}
            if of_weights.keys() <= self.gradients:
                most = 16.0 * max(of_weights.values(), default=0.0)
                self.gradients |= {key for key, size in sizes.items() if size <= most}

    def cause_in_forward(self, spoils: Sequence[str]) -> Cause:
        """Cause of a function whose numbers are rounding errors, which spoils some layers."""
        f = self.functions[0]
        what, remedy = "the numbers that it adds up cancel", remedies.NOTHING_LEFT
        if remedies.is_a(f, *NORMALIZATIONS):
            what, remedy = "the numbers that it normalises together are equal", remedies.CONSTANT_INPUT
        elif remedies.is_a(remedies.origin(f.inputs[0]), *NORMALIZATIONS):
            remedy = remedies.MEAN_OF_NORMALIZED
        what = f"it computes nothing but rounding errors, in fp32 too: {what}"
        return Cause("rounding_noise", self._network.name(f), what, remedy, spoils=tuple(spoils))

    def causes(self, names: Sequence[str]) -> Iterator[Cause]:
        """Cause of gradients that are mathematically 0, at the last layer for which the reason is known."""
        network, alike = self._network, alike_weights(self._network)
        layers = [layer for layer in self._layers if layer.name in names]
        cuts = set() if alike else self._cuts(layers)
        # A student learns once it differs from its teacher, of which it is a copy at the start.
        differences = set(filter(network.is_copy, cuts))
        layers = [layer for layer in layers if differences.isdisjoint(self._behind(layer))]
        spoils = tuple(layer.name for layer in layers)
        if not layers:
            return
        what = "its gradient in fp32 is nothing but rounding errors"
        what += f" (one of {len(layers)} layers)" * bool(layers[1:])
        if alike:
            what += f", as units stay alike: all numbers are equal in {listed(alike)}"
            yield Cause("equal_units", spoils[-1], what, remedies.INITIALISE, spoils=spoils)
            return
        reasons = ((layer.name, *self._cancelled(layer, cuts)) for layer in reversed(layers))
        unknown = spoils[-1], "", remedies.NOT_CONSTANT
        name, clause, remedy = next((one for one in reasons if one[1]), unknown)
        yield Cause("rounding_noise", name, what + clause, remedy, spoils=spoils)

    def is_bias(self, layer: Layer) -> bool:
        """True for a layer of vectors, such as a bias by hand, before a normalization, which removes them."""
        is_vector = all(max(v.shape, default=1) == v.size for v in layer.weights.values())
        return is_vector and remedies.is_a(self._first_reader(layer), *NORMALIZATIONS)

    def _cancelled(self, layer: Layer, cuts: Set[Any]) -> Tuple[str, str]:
        """Clause about the functions that make rounding errors of a layer's gradient, and a remedy."""
        network, reader = self._network, self._first_reader(layer)
        own = [f for f in self._behind(layer) if f in cuts]
        if own and remedies.is_a(own[0], *_COMPARING):
            why = f": {network.name(own[0])} hands none on, as "
            if same := self._same_inputs(own[0]):
                return f"{why}the same numbers are read by {network.listed(same)}", remedies.DIFFERENT
            is_softmax = remedies.is_a(own[0], *SOFTMAX)
            remedy = remedies.MEAN_OF_SOFTMAX if is_softmax else remedies.MEAN_OF_NORMALIZED
            return f"{why}the gradients of all numbers that it compares are equal", remedy
        if remedies.is_a(reader, *_COMPARING):
            why = "removes what this layer adds, which is the same for all numbers that it compares"
            return f": {network.name(reader)} {why}", remedies.CANCELS
        return f": its parts cancel in {network.listed(own)}" * bool(own), remedies.NOT_CONSTANT

    def _same_inputs(self, f: Any) -> List[Any]:
        """Softmaxes, such as that of a teacher, that read the same numbers from another variable."""
        own, seen = f.inputs[0], self._sights[0].data
        others = [g for g in self._network.graph.functions if remedies.is_a(g, *SOFTMAX)]
        same = [g for g in others if seen.get(hash(g.inputs[0])) == seen.get(hash(own))]
        return [g for g in same if g.inputs[0] != own]

    def _behind(self, layer: Layer) -> Iterator[Any]:
        """A layer's functions, and those that depend on them."""
        return self._network.behind(layer.outputs or layer.weights)

    def _first_reader(self, layer: Layer) -> Any:
        """First function behind a layer through which a shift of all its numbers does not remain one."""
        others = (f for f in self._behind(layer) if layer.outputs.keys().isdisjoint(map(hash, f.outputs)))
        return next((f for f in others if f.info.type_name not in _LINEAR), None)

    def _cuts(self, layers: Sequence[Layer]) -> Set[Any]:
        """Functions that make rounding errors of a gradient on its way to some layers."""
        network = self._network
        starts = [key for layer in layers for key in layer.outputs or layer.weights]
        behind = [f for f in network.behind(starts) if f in network.nodes]
        outputs = {hash(v) for f in behind for v in f.outputs}
        compared = outputs & {*network.readers, *map(hash, network.roots)}
        exact: Dict[int, NDArray[Any]] = {}
        noise: Set[int] = set()

        def read(f: Any) -> Iterator[Tuple[int, NDArray[Any]]]:
            return ((hash(v), np.array(v.grad.data, np.float64)) for v in f.outputs if hash(v) in compared)

        def compare(f: Any) -> None:
            for key, gradient in read(f):
                wanted = exact.pop(key)
                if not np.linalg.norm(gradient - wanted) < _NOISE * np.linalg.norm(wanted):
                    noise.add(key)

        self._passes.with_one_scale(self.exact, pre=lambda f: exact.update(read(f)))
        self._passes.with_one_scale(self._finer, pre=compare)
        arrives_exactly = (f for f in behind if noise.isdisjoint(map(hash, f.outputs)))
        return {f for f in arrives_exactly if not noise.isdisjoint(map(hash, f.inputs))}
