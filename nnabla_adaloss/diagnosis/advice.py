# SPDX-License-Identifier: Apache-2.0
"""The fewest bits that each layer needs, and what says so."""

from __future__ import annotations

from collections import Counter
from typing import AbstractSet, Dict, List, Mapping, NamedTuple, Sequence

from ..core.precision import Precision, PrecisionLike, get_precision
from .numbers import Kept

HARMLESS = 0.1
"""Relative error of a network's weight gradients, from storing one layer, that does no harm."""

TOGETHER = 0.3
"""Likewise from storing all layers as advised: errors of rounding add up on the way, and mostly cancel over
batches."""

LOST = 0.1
"""Share of a layer's gradients, or of its data, that may become 0."""

ROOM = 2.0**10
"""How much below the end of their format gradients are kept when they are tried: while a network learns, some
become smaller beside the largest one.
"""


class Candidate(NamedTuple):
    """A precision that is tried.

    Attributes:
        given: as it was given, to be put into `storage=`.
        precision: what it stands for.
    """

    given: PrecisionLike
    precision: Precision

    @property
    def bits(self) -> int:
        """How wide the numbers of a layer are, or what its matrix product reads."""
        return max(self.precision.forward.bits, self.precision.backward.bits)


class Harm(NamedTuple):
    """What storing a layer does, with every other in fp32.

    Attributes:
        gradients: what becomes of its gradients, with adaptive scaling at its defaults; `error` is the
            largest of any layer's weight gradient, so that it tells what the layer's data does to others.
        data_underflow: share of its outputs and weights that become 0.
        data_overflow: share of them that become infinite or NaN.
    """

    gradients: Kept
    data_underflow: float
    data_overflow: float

    def reason(self, tolerance: float = HARMLESS) -> str:
        """Why it is too much; empty: it does no harm."""
        if self.data_overflow:
            return "its data overflows"
        if self.gradients.overflow:
            return "its gradients overflow"
        if self.data_underflow > LOST:
            return f"{self.data_underflow:.0%} of its data become 0"
        if self.gradients.underflow > LOST:
            return f"{self.gradients.underflow:.0%} of its gradients become 0"
        # Also where it is NaN.
        return "" if self.gradients.error <= tolerance else f"error {self.gradients.error:.0%}"


class LayerAdvice(NamedTuple):
    """What is advised for one layer.

    Attributes:
        name: the layer; layers that share a parameter are one.
        candidate: the precision that it is advised to have.
        tried: what each precision does to it, by what it is called, from the fewest bits to the most.
        repeated: whether it is several uses of a parameter, numbered `#2`, `#3`, ...
        together: whether it got more bits than it needs by itself, because of what errors of several layers
            add up to.
    """

    name: str
    candidate: Candidate
    tried: Mapping[str, Harm]
    repeated: bool = False
    together: bool = False


class PrecisionAdvice:
    """What `diagnose` says when it is given several formats; `print` it.

    Args:
        layers: what is advised for each layer, in forward order.
        fewest: the candidate with the fewest bits.
        error: the largest error of a weight gradient with all layers stored as advised.
        batches: how many batches were looked at.

    Attributes:
        layers: what is advised for each layer, in forward order.
        storage: the same as `storage=` takes it.
        forbid: names of the layers that must not have the fewest bits.
        error: see above.
    """

    def __init__(self, layers: Sequence[LayerAdvice], fewest: Candidate, error: float, batches: int) -> None:
        self.layers, self.error, self._fewest, self._batches = layers, error, fewest, batches
        self.forbid: List[str] = [layer.name for layer in layers if layer.candidate.bits > fewest.bits]
        self.storage: Dict[str, PrecisionLike] = storage_of(
            {layer.name: layer.candidate for layer in layers},
            {layer.name for layer in layers if layer.repeated},
        )

    def __str__(self) -> str:
        names = list(self.layers[0].tried) if self.layers else []
        width = max([len(layer.name) for layer in self.layers] + [5])
        lines = [
            f"{'layer':<{width}}  {'advised':<12}  " + "  ".join(f"{name:<30.30}" for name in names),
        ]
        for layer in self.layers:
            cells = [f"{harm.reason() or 'ok, error ' + _percent(harm):<30}" for harm in layer.tried.values()]
            advised = str(layer.candidate.given) if isinstance(layer.candidate.given, str) else "as given"
            lines.append(f"{layer.name:<{width}}  {advised:<12}  " + "  ".join(cells).rstrip())
        forbid = ", ".join(self.forbid) or "none"
        lines.append(f"Layers that need more than {self._fewest.bits} bits: {forbid}.")
        lines.append(f"Largest error of a weight gradient with all of it: {self.error:.1%}.")
        lines.append("storage={")
        lines += [f"    {pattern!r}: {given!r}," for pattern, given in self.storage.items()]
        lines.append("}")
        return "\n".join(lines)


def candidates_of(storage: Sequence[PrecisionLike]) -> List[Candidate]:
    """The precisions that are tried, from the fewest bits to the most, float32 at last.

    Raises:
        TypeError: `storage` is no list.
        ValueError: one is unknown, or there is none.
    """
    if not isinstance(storage, Sequence):
        raise TypeError(
            f"storage={storage!r} must be a format, a mapping from patterns of layers, or a list of formats"
        )
    if not storage:
        raise ValueError("storage is an empty list: name the formats to be tried")
    found = [Candidate(given, get_precision(given)) for given in storage]
    found.sort(key=lambda candidate: candidate.bits)
    if found[-1].bits < _FP32.bits:
        found.append(_FP32)
    return found


def fewest_bits(tried: Mapping[str, Harm], candidates: Sequence[Candidate]) -> Candidate:
    """The first candidate that does no harm; the last one needs no trial."""
    for candidate, harm in zip(candidates, tried.values()):
        if not harm.reason():
            return candidate
    return candidates[-1]


def patterns_of(name: str, repeated: bool) -> Sequence[str]:
    """The patterns that match all uses of a layer, and nothing else."""
    return (name, f"{name}#*") if repeated else (name,)


def storage_of(layers: Mapping[str, Candidate], repeated: AbstractSet[str]) -> Dict[str, PrecisionLike]:
    """The mapping for `storage=`: what most layers have as `"*"`, the others by name.

    Args:
        layers: what each is to have; one or more.
        repeated: the names of those that are several uses of a parameter.
    """
    usual = Counter(c.precision for c in layers.values()).most_common(1)[0][0]
    found = {
        pattern: c.given
        for name, c in layers.items()
        if c.precision != usual
        for pattern in patterns_of(name, name in repeated)
    }
    return {**found, "*": next(c.given for c in layers.values() if c.precision == usual)}


def _percent(harm: Harm) -> str:
    return f"{harm.gradients.error:.1%}"


_FP32 = Candidate("float32", Precision("float32"))
