# SPDX-License-Identifier: Apache-2.0
"""Fewest bits of each layer: formats are tried layer by layer, then for all layers together."""

from __future__ import annotations

import math
from collections import Counter
from typing import AbstractSet, Dict, List, Mapping, NamedTuple, Sequence

import numpy as np

from ..core.config import AdaLossConfig
from ..core.formats import FLOAT32
from ..core.precision import PrecisionLike, get_precision
from ..engine import AdaptiveLossScaling
from .passes import Passes, StorageEffect, Tally, layers_of
from .target import Subject, input_name

_HARMLESS = 0.1  # harmless relative error of weight gradients, if one layer is stored
_TOGETHER = 0.3  # likewise if all are stored as advised: errors add up, but usually cancel over batches
_LOST = 0.1  # share of a layer's gradients, or of its data, that may become 0


class Harm(NamedTuple):
    """Effect of storing one layer, with every other in fp32.

    Attributes:
        gradients: effect on its gradients, with adaptive scaling at its defaults. The error is the largest
            one of any layer's weight gradient, as the data of one layer affect the gradients of others.
        data_underflow: share of its outputs and weights that become 0.
        data_overflow: share of them that become infinite or NaN.
    """

    gradients: StorageEffect
    data_underflow: float
    data_overflow: float

    def reason(self, tolerance: float = _HARMLESS) -> str:
        """Clause about why it is too large; empty if it is harmless."""
        if self.data_overflow:
            return "its data overflows"
        if self.gradients.overflow:
            return "its gradients overflow"
        if self.data_underflow > _LOST:
            return f"{self.data_underflow:.0%} of its data become 0"
        if self.gradients.underflow > _LOST:
            return f"{self.gradients.underflow:.0%} of its gradients become 0"
        is_small = self.gradients.error <= tolerance  # false for NaN, too
        return "" if is_small else f"error {self.gradients.error:.0%}"


class LayerAdvice(NamedTuple):
    """Advised storage of one layer; layers that share a parameter count as one."""

    name: str
    storage: PrecisionLike
    tried: Mapping[str, Harm]  # by name of the precision, from the fewest bits to the most
    repeated: bool = False  # True if a parameter has several uses: layers numbered `#2`, `#3`, ...


class PrecisionAdvice:
    """Advice of `diagnose` about several formats; `print` it.

    Attributes:
        layers: the advice for each layer, in forward order.
        storage: the same as an argument `storage=`.
        forbid: names of the layers that must not have the fewest bits.
        error: the largest error of a weight gradient with all layers stored as advised.
    """

    def __init__(
        self, layers: Sequence[LayerAdvice], fewest: PrecisionLike, error: float, note: str = ""
    ) -> None:
        self.layers, self.error, self._fewest, self._note = layers, error, bits_of(fewest), note
        self.forbid: List[str] = [layer.name for layer in layers if bits_of(layer.storage) > self._fewest]
        repeated = {layer.name for layer in layers if layer.repeated}
        self.storage: Dict[str, PrecisionLike] = storage_of({n.name: n.storage for n in layers}, repeated)

    def __str__(self) -> str:
        names = list(self.layers[0].tried) if self.layers else []
        width = max([len(layer.name) for layer in self.layers] + [5])
        lines = [self._note, ""] if self._note else []
        lines.append(f"{'layer':<{width}}  {'advised':<12}  " + "  ".join(f"{name:<30.30}" for name in names))
        for layer in self.layers:
            results = [h.reason() or f"ok, error {h.gradients.error:.1%}" for h in layer.tried.values()]
            advised = layer.storage if isinstance(layer.storage, str) else "see below"
            cells = "  ".join(f"{text:<30}" for text in results).rstrip()
            lines.append(f"{layer.name:<{width}}  {advised:<12}  {cells}")
        forbid = ", ".join(self.forbid) or "none"
        errors = f"With all layers stored as advised, weight gradients have errors up to {self.error:.1%}."
        lines += [f"Layers that need more than {self._fewest} bits: {forbid}.", errors, "storage={"]
        lines += [f"    {pattern!r}: {given!r}," for pattern, given in self.storage.items()]
        return "\n".join([*lines, "}"])


def bits_of(storage: PrecisionLike) -> int:
    """Bits of a layer's numbers, or of the operands of its matrix product."""
    precision = get_precision(storage)
    return max(precision.forward.bits, precision.backward.bits)


def candidates_of(storage: Sequence[PrecisionLike]) -> List[PrecisionLike]:
    """Precisions to try, from the fewest bits to the most, with one of 32 bits, which is always harmless."""
    if not storage:
        raise ValueError("storage is an empty list: name the formats to be tried")
    found = sorted(storage, key=bits_of)
    return found if any(map(_is_harmless, found)) else [*found, "float32"]


def _is_harmless(storage: PrecisionLike) -> bool:
    """True for storage of data and gradients in 32 bits, which need not be tried."""
    precision = get_precision(storage)
    return min(precision.stored_data.bits, precision.stored_gradients.bits) >= FLOAT32.bits


def storage_of(layers: Mapping[str, PrecisionLike], repeated: AbstractSet[str]) -> Dict[str, PrecisionLike]:
    """Mapping for `storage=`: the most frequent precision as `"*"`, and other layers, some `repeated`."""
    precisions = {name: get_precision(storage) for name, storage in layers.items()}
    usual = Counter(precisions.values()).most_common(1)[0][0]
    others = ((name, storage) for name, storage in layers.items() if precisions[name] != usual)
    found = {pattern: storage for name, storage in others for pattern in _patterns_of(name, repeated)}
    return {**found, "*": next(storage for name, storage in layers.items() if precisions[name] == usual)}


def _patterns_of(name: str, repeated: AbstractSet[str]) -> Sequence[str]:
    """Patterns that match all uses of a layer, and no other layer."""
    return (name, f"{name}#*") if name in repeated else (name,)


def advise(network: Subject, candidates: Sequence[PrecisionLike]) -> PrecisionAdvice:
    """Find the fewest bits for each layer; the network is restored afterwards."""
    with network.preserved():
        if network.beyond is not None:
            raise ValueError(f"{network.beyond.function}: {network.beyond.what}: check the indices")
        if network.unfed is not None:
            v, f = network.unfed
            reader = network.plan.labels[network.graph.numbers[hash(f)]]
            raise ValueError(f"nobody has filled {input_name(v)}, which {reader} reads: give a feeder")
        return _Trials(network).advise(candidates)


class _Trials:
    """Training passes over the recorded batches, with other formats for some or all layers."""

    def __init__(self, network: Subject) -> None:
        self._network = network
        self._layers = layers_of(network.graph, network.plan)
        self._passes = Passes(self._layers, network.forward)
        # Layers that use one parameter, by its first use: they get one format, as it is stored once.
        self._uses: Dict[str, List[str]] = {}
        for layer in self._layers:
            self._uses.setdefault(layer.name.partition("#")[0], []).append(layer.name)
        self._repeated = {name for name, uses in self._uses.items() if len(uses) > 1}
        # Keys of the data that a layer stores: its outputs and weights.
        outputs = {node.label: {network.graph.keys[p] for p in node.outputs} for node in network.plan.nodes}
        self._data = {layer.name: outputs[layer.name] | layer.weights.keys() for layer in self._layers}
        self._references = [self._passes.with_one_scale(network.loss, n) for n in range(len(network))]

    def advise(self, candidates: Sequence[PrecisionLike]) -> PrecisionAdvice:
        """Try each candidate on single layers; then try all layers, with more bits until errors are small."""
        tried = {name: self._alone(name, candidates) for name in self._uses}
        # Index of each layer's candidate, at first the first harmless one: harmful ones come before it.
        chosen = {name: sum(bool(h.reason()) for h in harms.values()) for name, harms in tried.items()}

        def own_error(name: str) -> float:
            """Error that a layer alone causes; 0 if its candidate has not been tried alone."""
            harm = tried[name].get(str(get_precision(candidates[chosen[name]])))
            return 0.0 if harm is None else harm.gradients.error

        while True:
            storage = {name: candidates[number] for name, number in chosen.items()}
            harms = self._try(storage_of(storage, self._repeated))
            bad = [name for name, harm in harms.items() if harm.reason(_TOGETHER)]
            narrow = [name for name, number in chosen.items() if number + 1 < len(candidates)]
            if not bad or not narrow:
                break
            # Layers that lose elements need more bits themselves; an error may come from any layer.
            lost = {name.partition("#")[0] for name in bad if harms[name].reason(math.inf)}
            for name in lost.intersection(narrow) or {max(narrow, key=own_error)}:
                chosen[name] += 1
        layers = [LayerAdvice(n, storage[n], tried[n], n in self._repeated) for n in self._uses]
        error = max((harm.gradients.error for harm in harms.values()), default=0.0)
        return PrecisionAdvice(layers, candidates[0], error, " ".join(map(str, self._network.notes)))

    def _alone(self, name: str, candidates: Sequence[PrecisionLike]) -> Dict[str, Harm]:
        """Effect of each candidate on a layer stored alone, up to the first harmless one."""
        found: Dict[str, Harm] = {}
        for candidate in candidates:
            if _is_harmless(candidate):
                break
            harms = self._try(dict.fromkeys(_patterns_of(name, self._repeated), candidate))
            own = [harms[use] for use in self._uses[name]]
            # The layer may also corrupt the gradients of others.
            overflow = max(harm.gradients.overflow for harm in harms.values())
            error = max(harm.gradients.error for harm in harms.values())
            underflow = max(harm.gradients.underflow for harm in own)
            data = (max(shares) for shares in zip(*(harm[1:] for harm in own)))
            harm = Harm(StorageEffect(underflow, overflow, error), *data)
            found[str(get_precision(candidate))] = harm
            if not harm.reason():
                break
        return found

    def _try(self, storage: Mapping[str, PrecisionLike]) -> Dict[str, Harm]:
        """Effect of a storage on each layer, over all batches."""
        emulation = self._network.emulated(storage)
        # Ten bits of headroom: during training, some gradients shrink relative to the largest one.
        config = AdaLossConfig(u_max=emulation.precisions.narrowest.stored_gradients.max / 2.0**10)
        scaling = AdaptiveLossScaling(emulation, config, parameters=self._network.parameters)
        tally = Tally(self._references[0])
        # By layer: nonzero elements of its data, and those that underflow and overflow.
        data = {layer.name: np.zeros(3) for layer in self._layers}
        for index, reference in enumerate(self._references):
            tally.add(self._passes.adaptive(scaling, index), reference)
            for layer in self._layers:
                for key in self._data[layer.name] & emulation.emulated_storage.data.keys():
                    seen = emulation.emulated_storage.data[key]
                    data[layer.name] += seen.nonzero, seen.underflowed, seen.overflowed
        shares = {name: (own[1:] / max(own[0], 1.0)).tolist() for name, own in data.items()}
        return {layer.name: Harm(tally.of(layer), *shares[layer.name]) for layer in self._layers}
