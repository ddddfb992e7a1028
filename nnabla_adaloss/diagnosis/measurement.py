# SPDX-License-Identifier: Apache-2.0
"""Runs a network in fp32 beside an emulated storage, with every way of scaling, and sums up what differs."""

from __future__ import annotations

from functools import partial
from typing import Dict, List, Mapping, Optional, Tuple

import nnabla as nn
import numpy as np

from ..core.power_of_two import clamp_scale, floor_power_of_two
from ..core.precision import LayerPrecisions
from ..core.scale_history import HistoryPolicy
from ..emulation import FormatEmulation
from ..engine import AdaptiveLossScaling
from ..graph.plan import GraphPlan
from .batches import Batches
from .examined import examined
from .graph_observer import GraphObserver
from .layers import Layer, layers_of
from .numbers import FunctionNumbers, LayerNumbers, NetworkNumbers, StoredIn, Untrained, Way
from .passes import LayerGradients, Passes
from .random_state import RandomState
from .tally import Tally
from .target import Target
from .training import training_of
from .untrained import untrained_parameters

# Where nnabla's updater starts.
_START = 8.0
# How often the largest scale is halved when gradients as stored are larger than in fp32.
_HALVINGS = 4
# The smallest number that a logarithm or a divisor is kept away from 0 by: fp16 holds it in full, and the
# gradient there, 2^14, too.
_TINY = 2.0**-14


def measure(target: Target, precisions: LayerPrecisions) -> NetworkNumbers:
    """Everything that verdicts are made from; the network is as before afterwards."""
    with examined(target) as (plan, batches, state, kernels):
        numbers = _Measurement(target, precisions, plan, batches, GraphObserver(plan, kernels), state).run()
        return numbers._replace(untrained=_untrained(target, plan, batches))


def _untrained(target: Target, plan: GraphPlan, batches: Batches) -> Optional[Untrained]:
    by_solver = None if target.solver is None else target.parameters
    return untrained_parameters(plan, by_solver, nn.get_parameters(grad_only=False), batches.fed)


class _Tallies:
    """What is counted of one layer."""

    def __init__(self) -> None:
        self.amax = 0.0
        self.floor = Tally()
        self.ways: Dict[Way, Tally] = {way: Tally() for way in Way}


class _Measurement:
    def __init__(
        self,
        target: Target,
        precisions: LayerPrecisions,
        plan: GraphPlan,
        batches: Batches,
        observer: GraphObserver,
        state: RandomState,
    ) -> None:
        self._loss, self._batches, self._observer, self._state = batches.loss, batches, observer, state
        self._solver, self._plan, self._layers = target.solver, plan, layers_of(plan)
        self._weight_gradients: Dict[int, float] = {}
        self._passes = Passes(self._layers)
        self._emulation = FormatEmulation(
            batches.loss, precisions.storage, float_tail=True, parameters=target.parameters
        )
        self._u_max = precisions.narrowest.stored_gradients.max
        self._tiny = max(_TINY, *(p.data_format(2).smallest_normal for p in precisions.storage.values()))
        self._storage = str(precisions)
        self._adaptive = AdaptiveLossScaling(self._emulation)
        self._tallies = {layer.name: _Tallies() for layer in self._layers}
        self._losses: List[Tuple[float, float]] = []

    def run(self) -> NetworkNumbers:
        """All passes of all batches."""
        for index in range(len(self._batches)):
            self._observe(index)
        scales = self._scales()
        for index in range(len(self._batches)):
            self._compare(index, scales)
        in_fp32, as_stored = zip(*self._losses)
        return NetworkNumbers(
            self._storage,
            self._u_max,
            len(self._batches),
            float(np.mean(in_fp32)),
            float(np.mean(as_stored)),
            scales,
            [self._numbers(layer) for layer in self._layers],
            self._functions(),
            self._tiny,
            training_of(self._solver, self._layers, self._weight_gradients),
        )

    def _observe(self, index: int) -> None:
        """In fp32, and forward as stored: what is not finite, how large gradients are."""
        observer = self._observer
        observer.begin_backward()
        gradients = self._passes.with_one_scale(
            partial(self._forward_in_fp32, index, observe=True),
            self._loss,
            1.0,
            observer.before_backward_in_fp32,
        )
        in_fp32 = float(self._loss.d)
        observer.end_backward()
        for layer in self._layers:
            tallies = self._tallies[layer.name]
            for key in layer.weights:
                magnitudes = np.abs(gradients.arrays[key])
                finite = np.isfinite(magnitudes)
                largest = float(np.max(magnitudes, where=finite, initial=0.0))
                size = (
                    float(np.sqrt(np.mean(np.square(magnitudes, dtype=np.float64)))) if finite.all() else 0.0
                )
                self._weight_gradients[key] = max(self._weight_gradients.get(key, 0.0), size)
                tallies.amax = max(tallies.amax, largest)
            tallies.amax = max(tallies.amax, observer.amax_of.get(layer.name, 0.0))
        self._forward_as_stored(index, observe=True)
        self._losses.append((in_fp32, float(self._loss.d)))

    def _compare(self, index: int, scales: Mapping[Way, float]) -> None:
        """Every way of scaling, on the same batch."""
        in_fp32 = self._passes.with_one_scale(partial(self._forward_in_fp32, index), self._loss, 1.0)
        forward = partial(self._forward_as_stored, index)
        # Of the same activations: what is lost is lost by storing gradients.
        unstored = self._passes.with_one_scale(forward, self._loss, 1.0)
        for layer in self._layers:
            floor = self._tallies[layer.name].floor
            for key in (*layer.outputs, *layer.weights):
                floor.count(in_fp32.arrays[key], unstored.arrays[key])
            self._add_errors(floor, layer, in_fp32, unstored)
        for way in Way:
            if way is Way.ADAPTIVE:
                stored = self._passes.adaptive(forward, self._adaptive, index)
            else:
                stored = self._passes.with_one_scale(forward, self._emulation, scales[way])
            for layer in self._layers:
                tally = self._tallies[layer.name].ways[way]
                for key in (*layer.outputs, *layer.weights):
                    tally.count(unstored.arrays[key], stored.arrays[key])
                self._add_errors(tally, layer, in_fp32, stored)

    def _add_errors(
        self, tally: Tally, layer: Layer, reference: LayerGradients, stored: LayerGradients
    ) -> None:
        for key in layer.weights or layer.outputs:
            unscaled = stored.arrays[key].astype(np.float64) / stored.scale_of(key)
            tally.compare(reference.arrays[key], unscaled)

    def _scales(self) -> Dict[Way, float]:
        amax = self._observer.amax
        policy = HistoryPolicy()
        one = policy.scale(amax, u_max=self._u_max) if amax else _START
        return {Way.NONE: 1.0, Way.START: _START, Way.ONE: one, Way.END: self._largest_scale()}

    def _largest_scale(self) -> float:
        """The largest power of two at which no batch overflows: where a scale that grows ends."""
        if not self._observer.amax:
            return _START
        scale = floor_power_of_two(clamp_scale(self._u_max / self._observer.amax))
        scale = min(scale, HistoryPolicy().max_scale)
        for _ in range(_HALVINGS):
            if all(self._holds(index, scale) for index in range(len(self._batches))):
                break
            scale /= 2.0
        return scale

    def _holds(self, index: int, scale: float) -> bool:
        forward = partial(self._forward_as_stored, index)
        return self._passes.with_one_scale(forward, self._emulation, scale).finite

    def _forward_in_fp32(self, index: int, *, observe: bool = False) -> None:
        self._feed(index)
        hook = self._observer.after_forward_in_fp32 if observe else None
        self._loss.forward(function_post_hook=hook)

    def _forward_as_stored(self, index: int, *, observe: bool = False) -> None:
        self._feed(index)
        hook = self._observer.after_forward_as_stored if observe else None
        self._emulation.forward(function_post_hook=hook)

    def _feed(self, index: int) -> None:
        self._batches.feed(index)
        self._state.restore_functions()
        self._observer.begin_forward()

    def _functions(self) -> List[FunctionNumbers]:
        found = self._observer.numbers()
        storage = self._emulation.emulated_storage
        if storage.precisions.only is not None:
            return found
        formats = [storage.data_format(hash(f.outputs[0]), f.outputs[0].size) for f in self._plan.functions]
        return [n._replace(stored=StoredIn(s.name, s.max)) for n, s in zip(found, formats)]

    def _stored(self, layer: Layer) -> Optional[StoredIn]:
        storage = self._emulation.emulated_storage
        if storage.precisions.only is not None:
            return None
        stored = storage.precision_of(next(iter({**layer.outputs, **layer.weights}))).stored_gradients
        return StoredIn(stored.name, stored.max)

    def _numbers(self, layer: Layer) -> LayerNumbers:
        tallies = self._tallies[layer.name]
        kept = {way: tally.kept() for way, tally in tallies.ways.items()}
        floor = tallies.floor
        return LayerNumbers(
            layer.name,
            layer.type_name,
            tallies.amax,
            floor.nonzero,
            floor.error,
            kept,
            self._stored(layer),
        )
