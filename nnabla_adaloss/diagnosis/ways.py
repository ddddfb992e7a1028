# SPDX-License-Identifier: Apache-2.0
"""Trial of the ways of scaling on each batch in one format, and the origins of their losses."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any, Dict, List, Sequence, Set
from typing import Counter as CounterOf

import nnabla as nn

from ..core.scale_history import HistoryPolicy
from ..emulation import FormatEmulation
from ..engine import AdaptiveLossScaling
from .passes import Gradients, Layer, Passes, StorageEffect, Tally
from .target import Network, Subject, scope_of
from .verdicts import TOLERANCE, Way

_CONSTANT = 65536.0
# Share of a layer's loss that its origin must lose.
_BEGINS = 0.5


class FormatTrial:
    """Trial of each way of scaling in one format, on gradients of up to `amax`."""

    def __init__(
        self, examined: Subject, layers: Sequence[Layer], emulation: FormatEmulation, amax: float
    ) -> None:
        u_max = emulation.precisions.narrowest.stored_gradients.max
        one = HistoryPolicy().scale(amax, u_max=u_max) if amax else 1.0
        self.scales: Dict[Way, float] = {Way.NONE: 1.0, Way.CONSTANT: _CONSTANT, Way.ONE: one}
        keys = [key for layer in layers for key in layer.weights or layer.outputs]
        self.floor, self.ways = Tally(keys), {way: Tally(keys) for way in Way}
        self._examined, self._passes = examined, Passes(layers)
        self._emulation, self._adaptive = emulation, AdaptiveLossScaling(emulation)
        # By way and key: elements that were nonzero before a gradient was rounded, and their fate.
        self._rounded: Dict[Way, Dict[int, CounterOf[str]]] = {way: {} for way in Way}

    def compare(self, index: int, in_fp32: Gradients) -> None:
        """Compare every way of scaling on one batch."""
        forward = partial(self._examined.forward, self._emulation, index)
        # From the same activations: all losses come from storing gradients.
        unstored = self._passes.with_one_scale(forward, self._emulation, round_gradients=False)
        self.floor.add(unstored, in_fp32)
        for way, tally in self.ways.items():
            if way is Way.ADAPTIVE:
                stored = self._passes.adaptive(forward, self._adaptive, index)
            else:
                stored = self._passes.with_one_scale(forward, self._emulation, self.scales[way])
            tally.add(stored, in_fp32, unstored)
            for key, seen in self._emulation.emulated_storage.gradients.items():
                counted = self._rounded[way].setdefault(key, Counter())
                counted.update(nonzero=seen.nonzero, underflow=seen.underflowed, overflow=seen.overflowed)

    def effects(self, layer: Layer, noise: Set[int]) -> Dict[Way, StorageEffect]:
        """Effect on a layer's worst parameter, except those whose gradients are noise."""
        return {way: tally.worst(layer, noise) for way, tally in self.ways.items()}

    def begins(self, network: Network, layer: Layer, way: Way, effect: StorageEffect) -> str:
        """First function of each branch in whose backward most of a layer's loss occurs; empty for a gradual
        loss.
        """
        what = "overflow" if effect.overflow else "underflow"
        least = 0.0 if effect.overflow else max(_BEGINS * effect.underflow, 0.01)
        counts = self._rounded[way].items()
        losing = {key for key, counted in counts if counted[what] > least * counted["nonzero"]}
        gone = {key for key, counted in counts if not counted["nonzero"] > counted["underflow"]}
        behind = {hash(f): f for f in network.behind(layer.outputs or layer.weights)}

        def loses(f: Any) -> bool:
            return not losing.isdisjoint(map(hash, onward(f)))

        def onward(f: Any) -> List[nn.Variable]:
            if hash(f) not in behind or gone.issuperset(map(hash, f.outputs)):
                return []
            return [v for v in f.inputs if hash(v.parent) in behind]

        walked = network.walk(network.last, lambda f: [] if loses(f) else onward(f))
        # Or in the backward of the layer.
        own = losing & layer.weights.keys()
        return network.listed(
            [f for f in walked if loses(f)]
            or [f for f in behind.values() if not own.isdisjoint(map(hash, f.inputs))]
        )

    def losing(self, network: Network, layer: Layer, way: Way, noise: Set[int]) -> str:
        """Parameters of a layer that lose, if others do not."""
        effects = {key: self.ways[way].effect([key], [key]) for key in layer.weights if key not in noise}
        found = [key for key, own in effects.items() if own.overflow or own.error > TOLERANCE]
        names = [network.plan.names.get(key, "an input") for key in found]
        # A function that only reshapes a parameter has no name of its own.
        is_named = any(layer.name.startswith(scope_of(name)) for name in names)
        return "" if is_named and len(found) == len(effects) else ", ".join(names)
