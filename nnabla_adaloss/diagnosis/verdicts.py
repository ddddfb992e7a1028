# SPDX-License-Identifier: Apache-2.0
"""Verdicts on ways of scaling, and on layers that lose their gradient, as sentences."""

from __future__ import annotations

import math
from operator import attrgetter
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence

from ..core.formats import Format
from ..core.power_of_two import scale_text
from ..core.scale_history import HistoryPolicy
from .causes import Cause, Note, listed
from .passes import TOLERANCE, StorageEffect, Way

_WORSE = 1.25  # factor by which an error above the tolerance may exceed the best way's
USELESS = 0.5  # error from which a gradient is useless
COARSE = 0.3  # errors above this are unusual, even in formats of 8 bits
_LOST = 0.5  # lost share from which an error above the tolerance is never accepted
_UNITS = 0.1  # share of a layer's units that may lose their gradient although another way keeps it


class LayerNumbers(NamedTuple):
    """Measurements of a layer: a function with weights, or a product of activations.

    Attributes:
        amax: largest magnitude in fp32 of its weights' gradients and its outputs'.
        nonzero: elements of its weights' gradients, or else of its outputs', that are not 0 in fp32.
        floor: error that stored activations and weights cause alone, with gradients in fp32.
        effects: effect of storage with each way of scaling.
        stored: format of its output gradient.
        is_noise: True if its gradient is 0 except for rounding errors, in fp32 too.
        is_random: True if its gradient differs from pass to pass over the same batch.
        waits_for: parameter that is 0, and blocks its gradient until training moves it.
        begins: functions in whose backward the gradient is lost.
        losing: parameters that lose, if others of the layer do not.
    """

    name: str
    type_name: str
    amax: float
    nonzero: int
    floor: float
    effects: Mapping[Way, StorageEffect]
    stored: Format
    is_noise: bool = False
    is_random: bool = False
    waits_for: str = ""
    begins: Mapping[Way, str] = {}
    losing: Mapping[Way, str] = {}

    @property
    def is_judged(self) -> bool:
        """True if it has a gradient that is the same in every pass, and more than rounding errors."""
        return bool(self.nonzero and not (self.is_noise or self.is_random))


class NetworkNumbers(NamedTuple):
    """Measurements of a network.

    Attributes:
        storage: name of the format.
        loss: mean in fp32.
        stored_loss: mean with activations and weights as stored.
        scales: scale of each way that has a single one.
        layers: in forward order; empty where something ended the examination.
        causes: faults that no loss scale can fix.
        formats: effects by format, layer and way.
    """

    storage: str
    batches: int
    loss: float
    stored_loss: float
    scales: Mapping[Way, float]
    layers: Sequence[LayerNumbers]
    causes: Sequence[Cause]
    formats: Mapping[str, Mapping[str, Mapping[Way, StorageEffect]]]
    notes: Sequence[Note]


class LayerVerdict(NamedTuple):
    """Verdict on one layer.

    Attributes:
        right_scale: largest power of two with two bits of headroom; None without a gradient.
        serves: ways that keep its gradient.
        line: the verdict in words.
    """

    name: str
    right_scale: Optional[float]
    serves: Sequence[Way]
    line: str


class Verdict(NamedTuple):
    """Verdict on a network.

    Attributes:
        line: the verdict in a few sentences, with the first cause.
        needs: least way of scaling that keeps every layer's gradient; None if none does.
        causes: faults that no loss scale can fix; those that stop all learning first.
        scaling: the line without the cause.
        layers: in forward order.
        trains: ways that train the whole network in each format.
    """

    line: str
    needs: Optional[Way]
    causes: Sequence[Cause]
    scaling: str
    layers: Sequence[LayerVerdict]
    trains: Mapping[str, Sequence[Way]]

    @property
    def formats(self) -> Mapping[str, Optional[Way]]:
        """The least way of scaling that trains in each format; None if none does."""
        return {name: next(iter(ways), None) for name, ways in self.trains.items()}


_IN_WORDS = {
    Way.NONE: "without scaling",
    Way.CONSTANT: "with a scale of 65536",
    Way.ONE: "with one measured scale",
    Way.ADAPTIVE: "with AdaptiveLossScalingUpdater",
}
# Kinds of causes in data, so that nothing can be judged, and of those that waste sound gradients.
_OF_DATA = "index_beyond unfed zero_input zero_loss"
_UNTRAINED = "untrained empty_solver on_gradients learning_rate epsilon small_steps solver weight_decay"
_HEADLINES = {
    **dict.fromkeys(_OF_DATA.split(), "Nothing can be said"),
    **dict.fromkeys(_UNTRAINED.split(), "Nothing is learned"),
}


def verdict_of(network: NetworkNumbers) -> Verdict:
    """Judge a network and each of its layers."""
    causes = sorted(network.causes, key=lambda cause: not cause.fatal)
    fatal = [cause for cause in causes if cause.fatal]
    layers = [_layer(layer, network, causes) for layer in network.layers]
    spoiled = {name for cause in causes for name in cause.spoils}
    hopeless = [layer.name for layer in layers if not layer.serves and layer.name in spoiled]
    nothing = ""  # reason why no gradient can be judged
    if network.layers and not any(layer.nonzero for layer in network.layers):
        nothing = f"no layer gets a gradient, and the loss is {network.loss:g}"
    elif network.layers and all(layer.is_random for layer in network.layers):
        nothing = "no gradient is the same in two passes over a batch"
    trains: Dict[str, List[Way]] = {}
    for name, effects in network.formats.items():
        stopped = nothing or any(name == network.storage or not cause.as_stored for cause in fatal)
        keep = (way for way in Way if all(serves(one, way) for one in effects.values()))
        trains[name] = [] if stopped else list(keep)
    needs = next(iter(trains.get(network.storage, ())), None)
    # First format that a way of scaling trains in, and the least such way.
    other = next((f"{name} {_IN_WORDS[ways[0]]}" for name, ways in trains.items() if ways), "")
    if fatal:
        works = f"; {other} works" * bool(other)
        scaling = f"{_HEADLINES.get(fatal[0].kind, 'No loss scale helps')}{works}."
    elif nothing:
        scaling = f"Nothing can be said: {nothing}."
    elif hopeless:
        scaling = f"No loss scale helps {listed(hopeless)}."
    elif needs is Way.ADAPTIVE and any(cause.kind == "no_float_tail" for cause in causes):
        scaling = "AdaptiveLossScalingUpdater works at its defaults."
    else:
        scaling = _network(network, layers, needs, other)
    if needs:
        worst = max(network.layers, key=lambda layer: layer.effects[needs].error)
        error = worst.effects[needs].error
        # Errors are twice as large in formats of 8 bits.
        if error > (COARSE if worst.stored.bits <= 8 else COARSE / 2.0):
            reach = f"Errors of gradients reach {error:.0%} in {worst.name}"
            scaling += f" {reach}, as {network.storage} is coarse."
    line = f"{scaling} {'But ' * bool(needs)}{causes[0]}" if causes else scaling
    return Verdict(line, needs, causes, scaling, layers, trains)


def serves(effects: Mapping[Way, StorageEffect], way: Way) -> bool:
    """True if a way keeps the gradient of a layer: without overflow, and with a harmless error."""
    own = effects[way]
    if own.overflow or not math.isfinite(own.error):
        return False
    # Units that lose their gradient in every way, such as those of rare words, are accepted; others are not.
    if own.lost_units > _UNITS + min(other.lost_units for other in effects.values()):
        return False
    # Nothing keeps more than a scale per component: twice the error, still less than batches differ, will do.
    if own.error <= TOLERANCE * (2.0 if way is Way.ADAPTIVE else 1.0):
        return True
    best = min((other.error for other in effects.values() if not other.overflow), default=math.inf)
    return own.error < USELESS and own.error <= _WORSE * best and own.underflow <= _LOST


def _layer(layer: LayerNumbers, network: NetworkNumbers, causes: Sequence[Cause]) -> LayerVerdict:
    """Judge a layer, by a cause at this layer if there is one."""
    right = HistoryPolicy().scale(layer.amax, u_max=layer.stored.max) if layer.amax else None
    keeps = [way for way in Way if serves(layer.effects, way)]
    if own := [cause for cause in causes if cause.function == layer.name]:
        line = own[0].what
    elif layer.is_noise:
        line = "its gradient in fp32 is nothing but rounding errors"
    elif layer.is_random:
        line = "not judged: its gradient differs from pass to pass"
    elif layer.waits_for:
        line = f"gets no gradient until training moves {layer.waits_for}, which is 0 now"
    elif not layer.nonzero:
        line = f"gets no gradient in {network.batches} batch{'es' * (network.batches > 1)}, not even in fp32"
        # The functions that compute its weight, such as `a/SpectralNorm` of `a`.
        weights = [other.name for other in network.layers if other.name.startswith(f"{layer.name}/")]
        line += f", apart from {listed(weights)}" * bool(weights)
    elif not keeps:
        line = f"with any scale, it {_lost(layer, Way.ADAPTIVE)}"
        line += ": stored activations and weights change its gradient" * (layer.floor > USELESS)
    elif keeps[0] is Way.NONE:
        lost = layer.effects[Way.NONE].underflow
        line = "needs no scaling" + (f"; losing {lost:.0%} does no harm" if lost >= 0.01 else "")
    elif keeps[0] is Way.ADAPTIVE:
        tail = any(cause.kind == "no_float_tail" and layer.name in cause.spoils for cause in causes)
        line = f"needs a {'float tail' if tail else 'scale of its own'}; without, it {_lost(layer, Way.NONE)}"
    else:
        scale = keeps[0].value if keeps[0] is Way.CONSTANT else scale_text(network.scales[keeps[0]])
        line = f"needs scaling; without, it {_lost(layer, Way.NONE)}; {scale} would do for it alone"
    others = [] if own else [cause.function for cause in causes if layer.name in cause.spoils]
    return LayerVerdict(layer.name, right, keeps, line + f"; see {others[0]}" if others else line)


def _lost(layer: LayerNumbers, way: Way) -> str:
    """Clause about the gradient that a layer loses: how much of it, by what, and where."""
    effect, begins, which = layer.effects[way], layer.begins.get(way, ""), layer.losing.get(way, "")
    if effect.overflow or effect.underflow > _LOST:
        share, to = (effect.overflow, "overflow") if effect.overflow else (effect.underflow, "underflow")
        of, where = f" of {which}" * bool(which), f" from {begins} on" * bool(begins)
        return f"loses {_percent(share)}%{of} to {to}{where}"
    if effect.lost_units > _UNITS and effect.error <= TOLERANCE:
        return f"loses the whole gradient of {effect.lost_units:.0%} of its units to underflow"
    within = f" in {which}" * bool(which)
    if math.isinf(effect.error):
        return f"gets NaN{within}"
    # Another scale would make the error smaller.
    is_small = effect.error > _WORSE * max(layer.floor, min(own.error for own in layer.effects.values()))
    where = f", from {begins} on" * bool(begins and is_small)
    coarse = f"{layer.stored.name} is coarse{' for numbers so small' * is_small}{where}"
    return f"has an error of {_percent(effect.error)}%{within}, as {coarse}"


def _percent(share: float) -> str:
    return f"{100.0 * share:.2g}" if share < 0.1 else f"{100.0 * share:.0f}"


def _network(network: NetworkNumbers, layers: List[LayerVerdict], needs: Optional[Way], other: str) -> str:
    """Sentences about the ways of scaling; `other`: a format and way to use if `needs` is None."""

    def fails(way: Way) -> str:
        """Clause about the layer that loses most in a way; empty if the way serves all."""
        found = [n for n, v in zip(network.layers, layers) if way not in v.serves]
        if not found:
            return ""
        worst = max(found, key=lambda n: attrgetter("overflow", "underflow", "error")(n.effects[way]))
        others = f" (and {len(found) - 1} more layer{'s' * (len(found) > 2)})" if found[1:] else ""
        return f"{worst.name} {_lost(worst, way)}{others}"

    if needs is None:
        line = f"No scaling keeps all gradients in {network.storage}: {fails(Way.ADAPTIVE)}. "
        worst = {way: max(layer.effects[way].error for layer in network.layers) for way in Way}
        if worst[Way.NONE] > 2.0 * worst[Way.ADAPTIVE]:
            line += f"AdaptiveLossScalingUpdater comes closest; without, {fails(Way.NONE)}. "
        return f"{line}Use {other or 'more bits'}."
    if needs is Way.NONE:
        full = [n for n in network.layers if n.effects[Way.CONSTANT].overflow]
        no_room = f", and has no room for 65536, which overflows in {full[-1].name}" if full else ""
        return f"{network.storage} needs no scaling here{no_room}."
    if needs is Way.CONSTANT:
        return f"A scale of 65536 works for all layers; without it, {fails(Way.NONE)}."
    if needs is Way.ONE:
        line = f"One measured scale works for all layers, {scale_text(network.scales[Way.ONE])} now; "
        line += f"without it, {fails(Way.NONE)}; with 65536, {fails(Way.CONSTANT)}. "
        if not fails(Way.ADAPTIVE):
            return f"{line}AdaptiveLossScalingUpdater measures it."
        adaptive = f"with AdaptiveLossScalingUpdater, {fails(Way.ADAPTIVE)}"
        return f"{line}FixedLossScalingUpdater keeps it; {adaptive}."
    line = f"{_apart(layers)}: AdaptiveLossScalingUpdater works at its defaults. "
    return f"{line}Without, {fails(Way.NONE)}; with one measured scale, {fails(Way.ONE)}."


def _apart(layers: Sequence[LayerVerdict]) -> str:
    """Sentence about two layers that one scale cannot serve together."""
    known = [(layer.right_scale, layer) for layer in layers if layer.right_scale]
    unserved = [one for one in known if Way.ONE not in one[1].serves] or known
    high, a = max(unserved, key=lambda one: one[0])
    low, b = min(known, key=lambda one: one[0])
    if a is b:
        return f"No single scale works for layer {a.name}"
    first, second = sorted((a, b), key=layers.index)
    return f"Layers {first.name} and {second.name} need scales {scale_text(high / low)} apart"
