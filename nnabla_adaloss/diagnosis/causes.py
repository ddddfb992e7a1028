# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a network that is no matter of the loss scale: judged from numbers alone."""

from __future__ import annotations

import math
from enum import Enum
from typing import FrozenSet, List, NamedTuple, Optional, Sequence

from .numbers import FunctionNumbers, LayerNumbers, NetworkNumbers

# By how much a single function may change the size of gradients before it is spoken of.
_EXPLODES = 2.0**7
_SHRINKS = 2.0**-10
# By how much gradients may differ from layer to layer before it is spoken of, where no function stands out.
_SPREAD = 2.0**20
# A relative error at which a gradient is not worth having.
_USELESS = 0.5

_RECTIFIERS: FrozenSet[str] = frozenset({"ReLU", "ReLU6", "CReLU"})
_ZERO_DIVISORS = {
    "Log": "keep its input away from 0: F.log(x + 1e-7)",
    "Div2": "keep the divisor away from 0: add 1e-7 to it",
    "RDivScalar": "keep the divisor away from 0: add 1e-7 to it",
    "PowScalar": "keep its input away from 0: add 1e-7 to it before the root",
    "Exp": "bound its input: F.minimum_scalar(x, 10.0)",
}
_LOOK = "look at what it reads: a logarithm, a root or a division at 0, an exponential of a large number"


class Kind(str, Enum):
    """What is wrong."""

    WEIGHT_NOT_FINITE = "weight_not_finite"
    DATA_NOT_FINITE = "data_not_finite"
    FORWARD_NOT_FINITE = "forward_not_finite"
    BACKWARD_NOT_FINITE = "backward_not_finite"
    BEYOND_STORAGE = "beyond_storage"
    ATTENTION_OVERFLOW = "attention_overflow"
    ACTIVATION_OVERFLOW = "activation_overflow"
    NO_GRADIENT = "no_gradient"
    EXPLODING = "exploding"
    SHRINKING = "shrinking"
    SMALL_LOSS = "small_loss"
    SPREAD = "spread"


class Cause(NamedTuple):
    """Something that is wrong, and what to do about it.

    Attributes:
        kind: what it is.
        layer: the layer that it is about, or the function where there is no layer.
        what: what is wrong, in words.
        remedy: what to do.
        fatal: whether no loss scale helps.
    """

    kind: Kind
    layer: str
    what: str
    remedy: str
    fatal: bool

    def __str__(self) -> str:
        return f"{self.layer}: {self.what}. {self.remedy[0].upper()}{self.remedy[1:]}"


def causes_of(network: NetworkNumbers) -> List[Cause]:
    """Everything that is wrong, what no scale helps first."""
    found = _not_finite(network) or _stored_not_finite(network) or _without_gradient(network)
    changes = [c for c in map(_change, network.functions) if c is not None]
    found += changes
    if not changes:
        found += _spread(network.layers)
    return sorted(found, key=lambda cause: not cause.fatal)


def _not_finite(network: NetworkNumbers) -> List[Cause]:
    """What is not finite in fp32 either."""
    suffers = not math.isfinite(network.loss) or any(f.breaks_gradient for f in network.functions)
    found: List[Cause] = []
    for f in network.functions:
        for leaf in f.leaves:
            # An attention mask of minus infinity harms nobody.
            if not (leaf.nans or suffers):
                continue
            held = _count(leaf.nans, "NaN") if leaf.nans else f"{leaf.infinities} infinities"
            if leaf.is_parameter:
                kind, remedy = (
                    Kind.WEIGHT_NOT_FINITE,
                    "load weights from before that, and look at what updates them",
                )
                what = f"its parameter {leaf.name} holds {held}"
            else:
                kind, remedy = Kind.DATA_NOT_FINITE, "clean the data, or leave out what is not finite"
                what = f"it reads data that holds {held} ({leaf.name})"
            found.append(Cause(kind, f.layer or f.name, what, remedy, True))
    if found:
        return found
    for f in network.functions:
        if f.nonfinite and suffers:
            what = f"{f.name} ({f.type_name}) computes {f.nonfinite} infinities or NaNs, in fp32 too"
            remedy = _ZERO_DIVISORS.get(f.type_name, _LOOK)
            found.append(Cause(Kind.FORWARD_NOT_FINITE, f.layer or f.name, what, remedy, True))
    if found:
        return found
    for f in network.functions:
        if f.breaks_gradient:
            what = f"the gradient of {f.name} ({f.type_name}) is not finite, in fp32 too"
            remedy = _ZERO_DIVISORS.get(f.type_name, _LOOK)
            found.append(Cause(Kind.BACKWARD_NOT_FINITE, f.layer or f.name, what, remedy, True))
    return found


def _stored_not_finite(network: NetworkNumbers) -> List[Cause]:
    """What leaves the storage in forward."""
    if math.isfinite(network.stored_loss) and all(layer.floor < _USELESS for layer in network.layers):
        return []
    found: List[Cause] = []
    ends = f"{network.storage}, which ends at {network.u_max:g}"
    for f in network.functions:
        where = f.layer or f.name
        if f.beyond:
            what = f"{f.beyond} holds numbers beyond {ends}"
            remedy = "bring them into range: normalise the data, or start from smaller weights"
            found.append(Cause(Kind.BEYOND_STORAGE, where, what, remedy, True))
        elif f.overflowed and f.scores:
            what = f"the attention scores of {f.name} reach {f.amax:.2g}, beyond {ends}"
            remedy = (
                "divide the queries by the root of their size before the product, not the scores after it"
            )
            found.append(Cause(Kind.ATTENTION_OVERFLOW, f.name, what, remedy, True))
        elif f.overflowed:
            what = f"what {f.name} ({f.type_name}) computes reaches {f.amax:.2g}, beyond {ends}"
            remedy = "normalise what it reads, make its weights smaller, keep it in fp32, or use bfloat16"
            found.append(Cause(Kind.ACTIVATION_OVERFLOW, where, what, remedy, True))
    return found


def _without_gradient(network: NetworkNumbers) -> List[Cause]:
    """Where gradients end, in fp32 too."""
    if all(layer.amax for layer in network.layers):
        return []
    found: List[Cause] = []
    for f in reversed(network.functions):
        if not f.stops_gradient:
            continue
        if f.type_name in _RECTIFIERS:
            what = (
                "its ReLU passes nothing: every output is 0, and so is every gradient behind it, in fp32 too"
            )
            remedy = "start again with a smaller learning rate or biases of 0, or use F.leaky_relu"
        elif f.is_layer:
            what = "its weights are all 0, so that no gradient passes, in fp32 too"
            remedy = (
                "initialise it otherwise, unless it is meant to start from 0 and learns from its own gradient"
            )
        else:
            what = f"{f.name} ({f.type_name}) passes no gradient, in fp32 too"
            remedy = "look whether it is saturated, or masks everything"
        found.append(Cause(Kind.NO_GRADIENT, f.layer or f.name, what, remedy, True))
    return found


def _change(f: FunctionNumbers) -> Optional[Cause]:
    """A function that changes the size of gradients by itself."""
    if f.growth is None:
        return None
    if f.loss_section:
        if f.type_name in ("MulScalar", "Mul2") and f.growth <= _SHRINKS:
            what = f"the loss behind it is multiplied by {f.growth:.1e}"
            remedy = "leave that to the learning rate, or let the scale be measured"
            return Cause(Kind.SMALL_LOSS, f.layer or f.name, what, remedy, False)
        return None
    itself = "it" if f.is_layer else f"{f.name} ({f.type_name})"
    if f.growth >= _EXPLODES:
        what = f"{itself} makes gradients {f.growth:.1e} times larger"
        remedy = "start from smaller weights, normalise, or clip gradients"
        return Cause(Kind.EXPLODING, f.layer or f.name, what, remedy, False)
    if f.growth <= _SHRINKS:
        what = f"{itself} makes gradients {1.0 / f.growth:.1e} times smaller"
        remedy = "start from larger weights, normalise, or take the factor out"
        return Cause(Kind.SHRINKING, f.layer or f.name, what, remedy, False)
    return None


def _spread(layers: Sequence[LayerNumbers]) -> List[Cause]:
    """Layers that together change the size of gradients."""
    known = [layer for layer in layers if layer.amax]
    if len(known) < 2:
        return []
    largest, smallest = max(known, key=_amax), min(known, key=_amax)
    ratio = largest.amax / smallest.amax
    if ratio < _SPREAD:
        return []
    vanish = known.index(smallest) < known.index(largest)
    verb = "vanish" if vanish else "explode"
    what = (
        f"gradients {verb} on their way to the input: they differ {ratio:.1e} times between {smallest.name} "
        f"and {largest.name}"
    )
    remedy = "normalise, add residual connections, or choose another activation or initialisation"
    return [Cause(Kind.SPREAD, smallest.name if vanish else largest.name, what, remedy, False)]


def _amax(layer: LayerNumbers) -> float:
    return layer.amax


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"
