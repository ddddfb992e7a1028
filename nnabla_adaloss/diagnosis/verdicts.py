# SPDX-License-Identifier: Apache-2.0
"""What the numbers mean: which scale each layer needs, and the network. Pure: from numbers to sentences."""

from __future__ import annotations

import math
from typing import Dict, List, NamedTuple, Optional, Sequence

from ..core.scale_history import HistoryPolicy
from .causes import Cause, causes_of
from .numbers import LayerNumbers, NetworkNumbers, Way

# Relative error of a weight gradient that does no harm.
_TOLERANCE = 0.05
# By how much a gradient may be worse than the best that any way makes of it, where the format is so narrow
# that all are worse than that.
_WORSE = 1.25
# A gradient of which more is lost is no gradient, whatever its error.
_LOST = 0.5
# From the least to the most that one has to do.
_EFFORT = (Way.NONE, Way.START, Way.ONE, Way.END, Way.ADAPTIVE)


class LayerVerdict(NamedTuple):
    """What is said of one layer."""

    name: str
    right_scale: Optional[float]  # the largest with two bits of headroom; None when it has no gradient
    serves: Sequence[Way]  # the ways that keep its gradient
    line: str
    judged: bool = True  # whether more can be said than that something else is to be mended first


class Verdict(NamedTuple):
    """What is said of a network."""

    line: str
    needs: Optional[Way]  # the least that keeps every layer's gradient; None: no way of scaling does
    causes: Sequence[Cause]  # what else is wrong; what no scale helps comes first
    layers: Sequence[LayerVerdict]  # in forward order


def judge(network: NetworkNumbers) -> Verdict:
    """The verdicts on a network and on each of its layers."""
    causes = causes_of(network)
    by_layer: Dict[str, Cause] = {}
    for cause in causes:
        by_layer.setdefault(cause.layer, cause)
    fatal = [cause for cause in causes if cause.fatal]
    layers = [_layer(layer, network, by_layer.get(layer.name), fatal) for layer in network.layers]
    if fatal:
        return Verdict(f"No loss scale helps: {fatal[0]}.", None, causes, layers)
    needs = next((way for way in _EFFORT if all(way in layer.serves for layer in layers)), None)
    return Verdict(_network(network, layers, needs), needs, causes, layers)


def serves(layer: LayerNumbers, way: Way) -> bool:
    """Whether a way keeps the gradient of a layer: nothing overflows, and its error does no harm."""
    kept = layer.kept[way]
    if kept.overflow or not math.isfinite(kept.error):
        return False
    best = min((k.error for k in layer.kept.values() if not k.overflow), default=math.inf)
    return kept.error <= _TOLERANCE or (kept.error <= _WORSE * best and kept.underflow <= _LOST)


def power(scale: float) -> str:
    """A power of two as one writes it: 2^11; small ones as numbers."""
    return f"{scale:g}" if 1.0 <= scale <= 16.0 else f"2^{round(math.log2(scale))}"


def _layer(
    layer: LayerNumbers, network: NetworkNumbers, cause: Optional[Cause], fatal: Sequence[Cause]
) -> LayerVerdict:
    right = HistoryPolicy().scale(layer.amax, u_max=layer.stored.max) if layer.amax else None
    keeps = [way for way in _EFFORT if layer.is_noise or serves(layer, way)]
    if cause is not None and cause.fatal:
        line = f"{cause.what}: {cause.remedy}"
    elif fatal and (not layer.nonzero or not keeps):
        return LayerVerdict(
            layer.name, right, keeps, f"cannot be judged until this is fixed: {fatal[0].layer}", False
        )
    elif layer.is_noise:
        line = "its gradient in fp32 is nothing but rounding errors"
        line = line if cause is None else f"{cause.what}: {cause.remedy}"
    elif not layer.nonzero:
        line = "receives no gradient, not even in fp32"
    elif not keeps:
        line = f"no scaling keeps its gradient in {layer.stored.name}: use more bits"
    else:
        line = _sentence(keeps[0], layer, network)
        line = line if cause is None else f"{line}; {cause.what}: {cause.remedy}"
    return LayerVerdict(layer.name, right, keeps, line)


def _sentence(way: Way, layer: LayerNumbers, network: NetworkNumbers) -> str:
    lost = layer.kept[Way.NONE].underflow
    if way is Way.NONE:
        return "needs no scaling" + (f"; losing {lost:.0%} does no harm" if lost >= 0.01 else "")
    without = (
        f"{lost:.0%} lost without" if lost >= 0.01 else f"error {layer.kept[Way.NONE].error:.0%} without"
    )
    if way is Way.ADAPTIVE:
        return f"needs a scale of its own ({without})"
    return f"needs scaling ({without}); {power(network.scales[way])} works"


def _network(network: NetworkNumbers, layers: Sequence[LayerVerdict], needs: Optional[Way]) -> str:
    storage = network.storage
    start = power(network.scales[Way.START])
    if needs is Way.NONE:
        line = f"{storage} needs no scaling here"
        full = [layer.name for layer, n in zip(layers, network.layers) if n.kept[Way.START].overflow]
        return f"{line}, and has no room for it: {start} overflows in {full[-1]}." if full else f"{line}."
    if needs is Way.START:
        return f"One scale of {start} works for all layers: nnabla's updater starts with it."
    if needs in (Way.ONE, Way.END):
        scale = power(network.scales[needs])
        bad = sum(Way.START not in layer.serves for layer in layers)
        return (
            f"One scale of {scale} works for all layers; {start}, where nnabla's updater starts, fails for "
            f"{bad} of {len(layers)}: start from {scale}, or use AdaptiveLossScalingUpdater."
        )
    apart = _apart(layers)
    if needs is None:
        worst = [layer.name for layer in layers if not layer.serves]
        failing = ", ".join(worst[:3]) if worst else apart
        return f"No scaling keeps all gradients in {storage}: {failing}. Use more bits."
    return f"{apart}: use AdaptiveLossScalingUpdater at its defaults."


def _apart(layers: Sequence[LayerVerdict]) -> str:
    """Two layers that one scale cannot serve together."""
    known: List[LayerVerdict] = [layer for layer in layers if layer.right_scale]
    short = [layer for layer in known if Way.END not in layer.serves] or known
    a = max(short, key=lambda layer: layer.right_scale or 0.0)
    b = min(known, key=lambda layer: layer.right_scale or 0.0)
    if a is b or not (a.right_scale and b.right_scale):
        return f"No single scale works for layer {a.name}"
    first, second = (a, b) if known.index(a) < known.index(b) else (b, a)
    apart = power(a.right_scale / b.right_scale)
    return f"Layers {first.name} and {second.name} need scales {apart} apart"
