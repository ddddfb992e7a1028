# SPDX-License-Identifier: Apache-2.0
"""Runs a network in fp32 beside an emulated storage, with every way of scaling, and sums up what differs."""

from __future__ import annotations

import math
from functools import partial
from typing import AbstractSet, Dict, Mapping, Set, Tuple

import numpy as np

from ..core.power_of_two import clamp_scale, floor_power_of_two
from ..core.precision import LayerPrecisions
from ..core.scale_history import HistoryPolicy
from ..core.statistics import ArrayStatistics
from ..emulation import FormatEmulation
from ..engine import AdaptiveLossScaling
from .numbers import LayerNumbers, NetworkNumbers, Way
from .observer import Observer
from .parameters import Reach, training_of
from .passes import Forward, Layer, LayerGradients, NoBackward, Passes, Tally, layers_of
from .target import Examined

# Where nnabla's updater starts.
_START = 8.0
# How often the largest scale is halved when gradients as stored are larger than in fp32.
_HALVINGS = 4
# The smallest number that a logarithm or a divisor is kept away from 0 by: fp16 holds it in full, and the
# gradient there, 2^14, too.
_TINY = 2.0**-14
# Gradients that differ by this share of themselves with another scale are rounding errors, provided that they
# are the same with a power of two. Other gradients differ by some millionths.
_NOISE = 0.1


def measure(network: Examined, precisions: LayerPrecisions) -> NetworkNumbers:
    """Everything that verdicts are made from; the network is as before afterwards."""
    with network.preserved():
        return _Measurement(network, precisions).run()


def _keep_largest(sizes: Dict[int, float], gradients: Mapping[int, ArrayStatistics]) -> None:
    """Keep the largest root of the mean square of each gradient."""
    for key, gradient in gradients.items():
        size = math.sqrt(gradient.mean_square) if gradient.finite else 0.0
        sizes[key] = max(sizes.get(key, 0.0), size)


class _Measurement:
    def __init__(self, network: Examined, precisions: LayerPrecisions) -> None:
        self._network, self._precisions = network, precisions
        self._layers = layers_of(network.plan)
        self._passes = Passes(self._layers)
        self._emulation = FormatEmulation(
            network.loss, precisions.storage, float_tail=True, parameters=network.parameters
        )
        self._adaptive = AdaptiveLossScaling(self._emulation)
        self._observer = Observer(network.plan, network.kernels, self._emulation)
        self._u_max = precisions.narrowest.stored_gradients.max
        # By name of the layer; the largest root of the mean square of each weight's gradient, by key.
        self._amax = {layer.name: 0.0 for layer in self._layers}
        self._floors = {layer.name: Tally() for layer in self._layers}
        self._noise = {layer.name for layer in self._layers}
        self._ways = {layer.name: {way: Tally() for way in Way} for layer in self._layers}
        self._weight_gradients: Dict[int, float] = {}
        self._before_hook: Dict[int, float] = {}

    def run(self) -> NetworkNumbers:
        network, batches = self._network, range(len(self._network))
        layers = self._layers
        try:
            in_fp32, as_stored = zip(*map(self._observe, batches))
            scales = self._scales()
            for index in batches:
                self._compare(index, scales)
        except NoBackward as error:
            self._observer.functions[error.function].no_backward = True
            in_fp32 = as_stored = (float(network.loss.d),)
            scales, layers = self._scales(), []
        data_formats = [p.data_format(2) for p in self._precisions.storage.values()]
        reach = Reach(network)
        return NetworkNumbers(
            storage=str(self._precisions),
            batches=len(network),
            loss=float(np.mean(in_fp32)),
            stored_loss=float(np.mean(as_stored)),
            scales=scales,
            layers=list(map(self._numbers, layers)),
            functions=list(self._observer.functions.values()),
            tiny=max(_TINY, *(stored.smallest_normal for stored in data_formats)),
            training=training_of(network, layers, self._weight_gradients, self._before_hook),
            untrained=reach.untrained(),
            forgotten=reach.forgotten(),
            note=network.note,
        )

    def _observe(self, index: int) -> Tuple[float, float]:
        """Look at a batch in fp32, and at its forward as stored; the loss of both."""
        network, observer = self._network, self._observer
        observer.begin()
        forward = partial(network.forward, network.loss, index, observer.after_forward_in_fp32)
        self._passes.with_one_scale(forward, network.loss, pre=observer.before_backward)
        in_fp32 = float(network.loss.d)
        observer.end_backward()
        for layer in self._layers:
            found = {key: observer.gradients[key] for key in layer.weights}
            largest = [observer.amax_of.get(layer.name, 0.0), *(g.abs_max for g in found.values())]
            self._amax[layer.name] = max(self._amax[layer.name], *largest)
            _keep_largest(self._before_hook, found)
        if network.on_gradients is not None:
            network.on_gradients(network.solver)
        for layer in self._layers:
            known = {key: observer.statistics(v.grad) for key, v in layer.weights.items()}
            _keep_largest(self._weight_gradients, {key: g for key, g in known.items() if g is not None})
        observer.begin()
        network.forward(self._emulation, index, observer.after_forward_as_stored)
        return in_fp32, float(network.loss.d)

    def _compare(self, index: int, scales: Mapping[Way, float]) -> None:
        """Every way of scaling, on the same batch."""
        network, passes, stored_forward = self._network, self._passes, self._stored_forward(index)
        forward = partial(network.forward, network.loss, index)
        in_fp32 = passes.with_one_scale(forward, network.loss)
        suspects = self._differ(self._noise, passes.with_one_scale(forward, network.loss, 3.0), in_fp32)
        if suspects:
            # Neither a gradient that is not linear nor random numbers of every pass.
            suspects -= self._differ(suspects, passes.with_one_scale(forward, network.loss, 2.0), in_fp32)
        self._noise = suspects
        # Of the same activations: what is lost is lost by storing gradients.
        unstored = passes.with_one_scale(stored_forward, network.loss)
        for layer in self._layers:
            self._floors[layer.name].add(layer, unstored, in_fp32)
        for way in Way:
            if way is Way.ADAPTIVE:
                stored = passes.adaptive(stored_forward, self._adaptive, index)
            else:
                stored = passes.with_one_scale(stored_forward, self._emulation, scales[way])
            for layer in self._layers:
                self._ways[layer.name][way].add(layer, stored, in_fp32, unstored)

    def _differ(self, names: AbstractSet[str], a: LayerGradients, b: LayerGradients) -> Set[str]:
        """Those of some layers whose gradients are finite and not the same."""
        found = set()
        for layer in self._layers:
            tally = Tally()
            tally.add(layer, a, b)
            if layer.name in names and _NOISE < tally.error < math.inf:
                found.add(layer.name)
        return found

    def _scales(self) -> Dict[Way, float]:
        amax = self._observer.amax
        one = HistoryPolicy().scale(amax, u_max=self._u_max) if amax else _START
        end = self._largest_scale(amax) if amax else _START
        return {Way.NONE: 1.0, Way.START: _START, Way.ONE: one, Way.END: end}

    def _largest_scale(self, amax: float) -> float:
        """The largest power of two at which no batch overflows: where a scale that grows ends."""
        scale = floor_power_of_two(clamp_scale(self._u_max / amax))
        scale = min(scale, HistoryPolicy().max_scale)
        for _ in range(_HALVINGS):
            if all(self._holds(index, scale) for index in range(len(self._network))):
                break
            scale /= 2.0
        return scale

    def _holds(self, index: int, scale: float) -> bool:
        return self._passes.with_one_scale(self._stored_forward(index), self._emulation, scale).finite

    def _stored_forward(self, index: int) -> Forward:
        return partial(self._network.forward, self._emulation, index)

    def _numbers(self, layer: Layer) -> LayerNumbers:
        name, key = layer.name, next(iter({**layer.outputs, **layer.weights}))
        floor = self._floors[name]
        return LayerNumbers(
            name,
            layer.type_name,
            self._amax[name],
            floor.nonzero,
            floor.error,
            {way: tally.kept() for way, tally in self._ways[name].items()},
            self._emulation.emulated_storage.precision_of(key).stored_gradients,
            name in self._noise,
        )
