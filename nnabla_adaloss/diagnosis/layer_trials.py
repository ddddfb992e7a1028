# SPDX-License-Identifier: Apache-2.0
"""Tries formats layer by layer, and all layers together as advised."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Dict, List, Mapping, Sequence, Set

import numpy as np

from ..core.config import AdaLossConfig
from ..core.precision import PrecisionLike
from ..emulation import FormatEmulation
from ..engine import AdaptiveLossScaling
from ..graph.plan import GraphPlan
from .advice import (
    ROOM,
    TOGETHER,
    Candidate,
    Harm,
    LayerAdvice,
    PrecisionAdvice,
    fewest_bits,
    patterns_of,
    storage_of,
)
from .batches import Batches
from .examined import examined
from .layers import Layer, layers_of
from .numbers import Kept
from .passes import LayerGradients, Passes
from .random_state import RandomState
from .tally import Tally
from .target import Target


def advise(target: Target, candidates: Sequence[Candidate]) -> PrecisionAdvice:
    """The fewest bits for each layer; the network is as before afterwards."""
    with examined(target) as (plan, batches, state, _):
        return _Trials(target, plan, batches, state).advise(candidates)


class _Trials:
    def __init__(self, target: Target, plan: GraphPlan, batches: Batches, state: RandomState) -> None:
        self._target, self._batches, self._state = target, batches, state
        self._layers = layers_of(plan)
        self._passes = Passes(self._layers)
        # Uses of one parameter are one layer here: it is stored once.
        self._uses: Dict[str, List[str]] = {}
        for layer in self._layers:
            self._uses.setdefault(layer.name.partition("#")[0], []).append(layer.name)
        # Data that a layer stores: what it writes, and its weights.
        functions = {plan.nodes[hash(f)].label: f for f in plan.functions if hash(f) in plan.nodes}
        self._data: Dict[str, Set[int]] = {
            layer.name: {*map(hash, functions[layer.name].outputs), *layer.weights} for layer in self._layers
        }
        self._references = [
            self._passes.with_one_scale(partial(self._forward, batches.loss, index), batches.loss, 1.0)
            for index in range(len(batches))
        ]

    def advise(self, candidates: Sequence[Candidate]) -> PrecisionAdvice:
        """Every layer alone with every candidate; then all together, with more bits where errors add up."""
        tried = {name: self._alone(name, candidates) for name in self._uses}
        chosen = {name: fewest_bits(harms, candidates) for name, harms in tried.items()}
        widened: Set[str] = set()
        while True:
            harms = self._try(self._storage_of(chosen))
            bad = [name for name, harm in harms.items() if harm.reason(TOGETHER)]
            if not bad:
                break
            narrow = [name for name in chosen if chosen[name] is not candidates[-1]]
            if not narrow:
                break
            # What is lost is lost where it shows; an error may come from anywhere.
            lost = {name.partition("#")[0] for name in bad if harms[name].reason(math.inf)}
            worst = lost.intersection(narrow) or {max(narrow, key=partial(_share, tried, chosen))}
            for name in worst:
                chosen[name] = candidates[candidates.index(chosen[name]) + 1]
            widened |= worst
        layers = [
            LayerAdvice(name, chosen[name], tried[name], self._repeated(name), name in widened)
            for name in self._uses
        ]
        error = max((harm.gradients.error for harm in harms.values()), default=0.0)
        return PrecisionAdvice(layers, candidates[0], error, len(self._batches))

    def _repeated(self, name: str) -> bool:
        return len(self._uses[name]) > 1

    def _storage_of(self, chosen: Mapping[str, Candidate]) -> Dict[str, PrecisionLike]:
        return storage_of(chosen, {name for name in chosen if self._repeated(name)})

    def _alone(self, name: str, candidates: Sequence[Candidate]) -> Dict[str, Harm]:
        """What each candidate does, up to the first that does no harm; fp32 needs no trial."""
        found: Dict[str, Harm] = {}
        for candidate in candidates:
            if candidate.precision.stored_data.bits == 32:
                break
            harms = self._try(dict.fromkeys(patterns_of(name, self._repeated(name)), candidate.given))
            own = [harms[use] for use in self._uses[name]]
            found[str(candidate.precision)] = Harm(
                Kept(
                    max(harm.gradients.underflow for harm in own),
                    max(harm.gradients.overflow for harm in harms.values()),
                    max(harm.gradients.error for harm in harms.values()),
                ),
                max(harm.data_underflow for harm in own),
                max(harm.data_overflow for harm in own),
            )
            if not found[str(candidate.precision)].reason():
                break
        return found

    def _try(self, storage: Mapping[str, PrecisionLike]) -> Dict[str, Harm]:
        """What a storage does to each layer, over all batches."""
        emulation = FormatEmulation(
            self._batches.loss, storage, float_tail=True, parameters=self._target.parameters
        )
        u_max = emulation.precisions.narrowest.stored_gradients.max / ROOM
        scaling = AdaptiveLossScaling(
            emulation, AdaLossConfig(u_max=u_max), parameters=self._target.parameters
        )
        tallies = {layer.name: Tally() for layer in self._layers}
        data = {layer.name: [0, 0, 0] for layer in self._layers}
        for index, reference in enumerate(self._references):
            stored = self._passes.adaptive(partial(self._forward, emulation, index), scaling, index)
            for layer in self._layers:
                self._compare(tallies[layer.name], layer, reference, stored)
                self._count(data[layer.name], self._data[layer.name], emulation)
        return {
            name: Harm(
                tally.kept(), _ratio(data[name][1], data[name][0]), _ratio(data[name][2], data[name][0])
            )
            for name, tally in tallies.items()
        }

    def _compare(self, tally: Tally, layer: Layer, reference: LayerGradients, stored: LayerGradients) -> None:
        for key in (*layer.outputs, *layer.weights):
            tally.count(reference.arrays[key], stored.arrays[key])
        for key in layer.weights or layer.outputs:
            unscaled = stored.arrays[key].astype(np.float64) / stored.scale_of(key)
            tally.compare(reference.arrays[key], unscaled)

    def _count(self, counts: List[int], keys: Set[int], emulation: FormatEmulation) -> None:
        for key in keys:
            rounding = emulation.emulated_storage.data_rounding(key)
            if rounding is not None:
                statistics = rounding.statistics
                counts[0] += statistics.count - statistics.zeros + rounding.underflowed
                counts[1] += rounding.underflowed
                counts[2] += rounding.overflowed

    def _forward(self, loss: Any, index: int) -> None:
        self._batches.feed(index)
        self._state.restore_functions()
        loss.forward()


def _share(tried: Mapping[str, Mapping[str, Harm]], chosen: Mapping[str, Candidate], name: str) -> float:
    """The error that a layer brings in by itself, as it is stored now."""
    harm = tried[name].get(str(chosen[name].precision))
    return 0.0 if harm is None else harm.gradients.error


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
