# SPDX-License-Identifier: Apache-2.0
"""Runs a network in fp32 beside an emulated storage, with every way of scaling, and sums up what differs."""

from __future__ import annotations

import math
from functools import partial
from typing import AbstractSet, Any, Dict, FrozenSet, List, Mapping, Optional, Sequence, Set, Tuple

import nnabla as nn
import numpy as np

from ..core.power_of_two import clamp_scale, floor_power_of_two
from ..core.precision import LayerPrecisions
from ..core.scale_history import HistoryPolicy
from ..emulation import FormatEmulation
from ..engine import AdaptiveLossScaling
from ..graph.plan import GraphPlan
from .numbers import LayerNumbers, NetworkNumbers, Training, Untrained, Way, WeightStep
from .observer import Observer
from .passes import Forward, Layer, Passes, Tally, layers_of
from .target import Examined, Target, examined

# Where nnabla's updater starts.
_START = 8.0
# How often the largest scale is halved when gradients as stored are larger than in fp32.
_HALVINGS = 4
# The smallest number that a logarithm or a divisor is kept away from 0 by: fp16 holds it in full, and the
# gradient there, 2^14, too.
_TINY = 2.0**-14

# Solvers whose step is the learning rate times the gradient.
_BY_GRADIENT: FrozenSet[str] = frozenset({"Sgd", "SgdW", "Momentum", "Nesterov"})
# Theirs is about the learning rate, however large the gradient.
_BY_SIGN: FrozenSet[str] = frozenset(
    {"Adam", "AdamW", "Adamax", "AMSGRAD", "AMSBound", "AdaBound", "AdaBelief", "Lion", "RMSprop"}
)


def measure(target: Target, precisions: LayerPrecisions) -> NetworkNumbers:
    """Everything that verdicts are made from; the network is as before afterwards."""
    with examined(target) as network:
        return _Measurement(network, precisions).run()


class _Measurement:
    def __init__(self, network: Examined, precisions: LayerPrecisions) -> None:
        self._network, self._precisions = network, precisions
        self._layers = layers_of(network.plan)
        self._passes = Passes(self._layers)
        self._emulation = FormatEmulation(
            network.loss, precisions.storage, float_tail=True, parameters=network.target.parameters
        )
        self._adaptive = AdaptiveLossScaling(self._emulation)
        self._observer = Observer(network.plan, network.kernels, self._emulation)
        self._u_max = precisions.narrowest.stored_gradients.max
        # By name of the layer; the largest root of the mean square of each weight's gradient, by key.
        self._amax = {layer.name: 0.0 for layer in self._layers}
        self._floors = {layer.name: Tally() for layer in self._layers}
        self._ways = {layer.name: {way: Tally() for way in Way} for layer in self._layers}
        self._weight_gradients: Dict[int, float] = {}

    def run(self) -> NetworkNumbers:
        network, storages = self._network, self._precisions.storage.values()
        batches = range(len(network))
        in_fp32, as_stored = zip(*map(self._observe, batches))
        scales = self._scales()
        for index in batches:
            self._compare(index, scales)
        return NetworkNumbers(
            storage=str(self._precisions),
            u_max=self._u_max,
            batches=len(network),
            loss=float(np.mean(in_fp32)),
            stored_loss=float(np.mean(as_stored)),
            scales=scales,
            layers=list(map(self._numbers, self._layers)),
            functions=list(self._observer.functions.values()),
            tiny=max(_TINY, *(p.data_format(2).smallest_normal for p in storages)),
            training=training_of(network.target.solver, self._layers, self._weight_gradients),
            untrained=untrained_parameters(
                network.plan,
                None if network.target.solver is None else network.target.parameters,
                nn.get_parameters(grad_only=False),
                network.fed,
            ),
        )

    def _observe(self, index: int) -> Tuple[float, float]:
        """Look at a batch in fp32, and at its forward as stored; the loss of both."""
        network, observer = self._network, self._observer
        observer.begin()
        self._passes.with_one_scale(
            partial(network.forward, network.loss, index, observer.after_forward_in_fp32),
            network.loss,
            pre=observer.before_backward,
        )
        in_fp32 = float(network.loss.d)
        observer.end_backward()
        for layer in self._layers:
            found = {key: observer.gradients[key] for key in layer.weights}
            largest = [observer.amax_of.get(layer.name, 0.0), *(g.abs_max for g in found.values())]
            self._amax[layer.name] = max(self._amax[layer.name], *largest)
            for key, gradient in found.items():
                size = math.sqrt(gradient.mean_square) if gradient.finite else 0.0
                self._weight_gradients[key] = max(self._weight_gradients.get(key, 0.0), size)
        observer.begin()
        network.forward(self._emulation, index, observer.after_forward_as_stored)
        return in_fp32, float(network.loss.d)

    def _compare(self, index: int, scales: Mapping[Way, float]) -> None:
        """Every way of scaling, on the same batch."""
        network, passes, stored_forward = self._network, self._passes, self._stored_forward(index)
        in_fp32 = passes.with_one_scale(partial(network.forward, network.loss, index), network.loss)
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
        key = next(iter({**layer.outputs, **layer.weights}))
        stored = self._emulation.emulated_storage.precision_of(key).stored_gradients
        kept = {way: tally.kept() for way, tally in self._ways[layer.name].items()}
        floor, amax = self._floors[layer.name], self._amax[layer.name]
        return LayerNumbers(layer.name, layer.type_name, amax, floor.nonzero, floor.error, kept, stored)


def training_of(
    solver: Optional[Any], layers: Sequence[Layer], gradients: Mapping[int, float]
) -> Optional[Training]:
    """What `solver` is about to do, with `gradients` of such a size by key; None without a solver."""
    if solver is None or not hasattr(solver, "learning_rate"):
        return None
    rate = float(solver.learning_rate())
    states = solver.get_states().values() if hasattr(solver, "get_states") else ()
    updates = max((int(state.t) for state in states), default=0)
    held = {hash(v) for v in solver.get_parameters().values()}
    steps: List[WeightStep] = []
    for layer in layers:
        for key, v in layer.weights.items():
            fan_in = _fan_in(layer.type_name, v.shape)
            if fan_in and key in held:
                weight = float(np.sqrt(np.mean(np.asarray(v.data.data, np.float64) ** 2)))
                update = _step(solver, rate, gradients.get(key, 0.0))
                steps.append(WeightStep(layer.name, weight, 1.0 / math.sqrt(fan_in), update))
    return Training(rate, updates, steps)


def _step(solver: Any, rate: float, gradient: float) -> float:
    if solver.name in _BY_GRADIENT:
        # Momentum adds up to this.
        return rate * gradient / (1.0 - min(float(solver.info.get("momentum", 0.0)), 0.999))
    return rate if solver.name in _BY_SIGN and gradient else 0.0


def _fan_in(type_name: str, shape: Sequence[int]) -> int:
    """Of a weight; 0 for biases and where it is not known."""
    if len(shape) < 2 or not math.prod(shape):
        return 0
    if type_name == "Affine":
        return shape[0]
    return math.prod(shape[1:]) if type_name == "Convolution" else 0


def untrained_parameters(
    plan: GraphPlan,
    by_solver: Optional[Mapping[str, nn.Variable]],
    registered: Mapping[str, nn.Variable],
    fed: AbstractSet[int],
) -> Optional[Untrained]:
    """The parameters that need a gradient and get none from this loss.

    What a solver has is to be trained. Of a loss alone it is not known what is: a discriminator's loss
    reaches no generator, and a frozen part has no gradient on purpose. Registered parameters are spoken of
    when they share their outermost scope with one that is trained, or when no data comes to any trained layer
    but by way of something that is cut off.
    """
    trained, reached = _reached(plan)
    leaves = [v for f in plan.functions for v in f.inputs if v.parent is None]
    # With `fix_parameters=True` it is the leaf of the graph that needs no gradient. A solver does not know.
    frozen = {hash(v) for v in (*leaves, *registered.values()) if not v.need_grad}
    wanted = registered if by_solver is None else by_solver
    names = [name for name, v in wanted.items() if hash(v) not in reached | frozen]
    if by_solver is None and not _cut_from_data(plan, trained, fed):
        scopes = {name.split("/")[0] for name, v in registered.items() if hash(v) in reached}
        names = [name for name in names if name.split("/")[0] in scopes]
    return Untrained(tuple(names), by_solver is not None) if names else None


def _reached(plan: GraphPlan) -> Tuple[Set[int], Set[int]]:
    """Keys of the functions and of the leaves that the gradient of the loss comes to."""
    functions: Set[int] = set()
    leaves: Set[int] = set()
    waiting: List[Any] = [plan.functions[-1]]
    while waiting:
        f = waiting.pop()
        if hash(f) in functions or f.info.type_name == "Unlink":
            continue
        functions.add(hash(f))
        with_gradient = [v for v in f.inputs if v.need_grad]
        leaves.update(hash(v) for v in with_gradient if v.parent is None)
        waiting += [v.parent for v in with_gradient if v.parent is not None]
    return functions, leaves


def _cut_from_data(plan: GraphPlan, trained: AbstractSet[int], fed: AbstractSet[int]) -> bool:
    """Whether no trained layer reads data, but what comes from parts that the gradient does not come to."""
    if not fed:
        return False
    carries: Set[int] = set(fed)
    for f in plan.functions:
        if carries.isdisjoint(map(hash, f.inputs)):
            continue
        node = plan.nodes.get(hash(f))
        if hash(f) in trained:
            if node is not None and node.leaves:
                return False
            carries.update(map(hash, f.outputs))
        elif not any(v.need_grad for v in f.inputs) and f.info.type_name != "Unlink":
            # Nothing to train yet: it only prepares the data.
            carries.update(map(hash, f.outputs))
    return True
