# SPDX-License-Identifier: Apache-2.0
"""Units of layers without a gradient in any batch."""

from __future__ import annotations

from typing import Any, Collection, Dict, Iterator, Sequence, Tuple

import numpy as np
from numpy.typing import NDArray

from . import remedies
from .causes import Note
from .network import Network
from .passes import Gradients


class Units:
    """Units of products with parameters that a gradient reaches, over the batches so far."""

    def __init__(self, network: Network) -> None:
        self._network = network
        # Not backward products of a gradient penalty, whose units are inputs.
        self._products = [f for f in network.weighted if not f.info.type_name.endswith("Grad")]
        self._reached: Dict[int, NDArray[np.bool_]] = {}  # by weight, as several products may share one

    def add(self, gradients: Gradients) -> None:
        """Add the gradients of outputs in a batch."""
        for f in self._products:
            gradient = gradients.get(hash(f.outputs[0]))
            if gradient is not None:
                axis, key = 1 if "onvolution" in f.info.type_name else -1, hash(f.inputs[1])
                by_unit = np.moveaxis(gradient, axis, -1).reshape(-1, gradient.shape[axis])
                self._reached[key] = np.any(by_unit, axis=0) | self._reached.get(key, False)

    def notes(self, told: Collection[str]) -> Iterator[Note]:
        """Note layers with such units, except for functions that are told already."""
        first = {hash(f.inputs[1]): f for f in reversed(self._products)}
        for f in self._network.in_order(first.values()):
            dead = ~self._reached.get(hash(f.inputs[1]), np.ones(1, bool))
            readers = self._network.readers.get(hash(f.outputs[0]), [])
            names = {self._network.name(g) for g in (f, *readers)}
            if dead.any() and not dead.all() and names.isdisjoint(told):
                why, remedy = self._reason(f, readers, dead)
                behind = self._network.behind(map(hash, f.outputs))
                if remedy == remedies.INITIALISE and any(self._masks(g, dead) for g in behind):
                    continue
                # Without a reason, only many are reported.
                if remedy != remedies.NO_UNIT or np.mean(dead) >= 0.6:
                    end = f" learns nothing in {np.count_nonzero(dead)} of {dead.size} units, {why}. "
                    yield Note("", [self._network.name(f)], f"{end}{remedy[0].upper()}{remedy[1:]}.")

    def _masks(self, f: Any, dead: NDArray[np.bool_]) -> bool:
        """True for a product with constants, or data, that are 0 for these units."""
        others = [v for v in f.inputs if f.info.type_name == "Mul2" and not v.need_grad]
        known = [v.d for v in others if v.shape[-1:] == dead.shape and not v.data.clear_called]
        return any(not x[..., dead].any() for x in known)

    def _reason(self, f: Any, readers: Sequence[Any], dead: NDArray[np.bool_]) -> Tuple[str, str]:
        """Clause about the reason, and a remedy."""
        network = self._network
        if all(g.info.type_name == "Slice" for g in readers):
            return "which no function reads", remedies.CHECK_SLICES
        for g in (f, *readers):
            for v in (v for v in g.inputs[1:] if hash(v) in network.names and v.size == dead.size):
                if v.d.flatten()[dead].max() < v.d.flatten()[~dead].min():
                    return f"as {network.called(v)} reaches {v.d.min():.3g} there", remedies.SMALLER_BIAS
        weights = f.inputs[1].d
        axes = [axis for axis, size in enumerate(weights.shape) if size == dead.size]
        if any(not np.moveaxis(weights, axis, 0)[dead].any() for axis in axes):
            return "whose weights are all 0", remedies.INITIALISE
        return "to which no gradient gets", remedies.NO_UNIT
