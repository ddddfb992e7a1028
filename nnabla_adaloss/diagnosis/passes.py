# SPDX-License-Identifier: Apache-2.0
"""Passes over a batch with each way of scaling, the gradients of layers in them, and their comparison."""

from __future__ import annotations

import math
from collections import Counter
from enum import Enum
from functools import partial
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set

import nnabla as nn
import numpy as np
from numpy.typing import NDArray

from ..core.formats import FLOAT32
from ..core.scale_history import HistoryPolicy
from ..core.verdict import Rules
from ..emulation.format_emulation import FormatEmulation
from ..emulation.rounded_storage import RoundedStorage
from ..engine import AdaptiveLossScaling, BatchLoop
from ..graph.description import type_name_of
from ..graph.graph import Graph
from ..graph.hooks import Hook
from ..graph.loss import LossLike
from ..graph.plan import GraphPlan
from .network import Network, scope_of
from .watching import Sight

Forward = Callable[..., None]
"""Runs forward; its arguments are a loss, the index of a batch, and a post hook."""

Gradients = Dict[int, NDArray[Any]]
"""Gradients of outputs and weights of layers, by key, as a pass has stored them, divided by their scales."""

_CANCELLED = 0.01  # share of a weight's gradient below which a bias' has cancelled, and hardly moves it
_REPEATS = 19  # limit of repeats of a batch until its scales fit
TOLERANCE = 0.05  # harmless relative error of a weight gradient
_BEGINS = 0.5  # share of a layer's loss that its origin must lose
# Order of a tally's sums: numbers of elements, and squares of errors and of exact gradients.
_NONZERO, _LOST, _FINITE, _OVERFLOWED, _SQUARED_ERROR, _SQUARED = range(6)


class Way(str, Enum):
    """Ways of scaling to try, in order of effort.

    Attributes:
        NONE: no scaling.
        CONSTANT: a constant scale, as is usual.
        ONE: one measured scale.
        ADAPTIVE: a measured scale per component, by `AdaptiveLossScalingUpdater`.
    """

    NONE = "none"
    CONSTANT = "65536"
    ONE = "one"
    ADAPTIVE = "adaptive"


class Layer(NamedTuple):
    """Function with weights, or product of activations; its variables are given by key."""

    name: str
    type_name: str
    # Outputs that a function reads, or the loss: nnabla has no gradient for unused last states of an LSTM.
    outputs: Dict[int, nn.Variable]
    # Leaves whose gradients it computes; a weight with several uses belongs to the first.
    weights: Dict[int, nn.Variable]


def layers_of(graph: Graph, plan: GraphPlan) -> List[Layer]:
    """Layers of a graph, in forward order."""
    found: List[Layer] = []
    taken: Set[int] = set()
    read = {*plan.readers, *plan.roots}
    for node in sorted(plan.nodes, key=lambda node: node.number):
        if node.layer_inputs or node.leaves:
            outputs = {graph.keys[p]: graph.variables[p] for p in node.outputs if p in read}
            weights = {graph.keys[p]: graph.variables[p] for p in node.leaves if p not in taken}
            taken.update(node.leaves)
            found.append(Layer(node.label, node.type_name, outputs, weights))
    return found


def parameter_layers(graph: Graph, plan: GraphPlan) -> List[Layer]:
    """Layers with parameters, each with the outputs of all functions that use them; else all layers."""
    every = layers_of(graph, plan)
    owners = {key: layer for layer in every for key in layer.weights}
    leaves = {node.label: node.leaves for node in plan.nodes}
    for layer in every:
        if not layer.weights and leaves[layer.name]:
            owner = owners[graph.keys[leaves[layer.name][0]]]
            owner.outputs.update(layer.outputs)
    return [layer for layer in every if layer.weights] or every


class NoBackward(ValueError):
    """Error for a function on a gradient's path that has no backward; `reason` is nnabla's message."""

    def __init__(self, f: Any, reason: str) -> None:
        self.function, self.reason = f, reason
        kind = type_name_of(f.info.type_name)
        super().__init__(f"{kind} has no backward: nothing before it can be trained")


class Passes:
    """Runs forward, with the same random numbers each time, and backward; keeps gradients of layers."""

    def __init__(self, layers: Sequence[Layer], forward: Forward) -> None:
        self.layers, self._forward = layers, forward
        self._outputs = {key: v for layer in layers for key, v in layer.outputs.items()}
        self._weights = {key: v for layer in layers for key, v in layer.weights.items()}
        # Each use of a weight is a variable of its own, with the same gradient.
        self._key_of_grad = {hash(v.grad): key for key, v in self._weights.items()}

    def observe(self, loss: LossLike, index: int, sight: Sight) -> None:
        """Run a batch with gradients in fp32, and let `sight` note its arrays."""
        backward: Any = loss.backward
        if not isinstance(loss, nn.Variable):
            backward = partial(backward, round_gradients=False)
        self._run(partial(self._forward, loss, index, sight.after_forward), backward, sight.before_backward)
        sight.end()

    def with_one_scale(
        self,
        loss: LossLike,
        index: int = 0,
        scale: float = 1.0,
        *,
        round_gradients: bool = True,
        pre: Optional[Hook] = None,
    ) -> Gradients:
        """Run a batch with one scale for all; an emulation as `loss` may leave gradients in fp32."""
        storage: Optional[RoundedStorage] = getattr(loss, "emulated_storage", None)
        backward: Any = loss.backward
        if not round_gradients:
            storage, backward = None, partial(backward, round_gradients=False)
        # A weight that is used twice gets a sum of two gradients. One of them may overflow although the sum,
        # by cancelling, does not: elements where this happens are infinite in the result.
        sums: Dict[int, NDArray[Any]] = {}
        overflowed: Dict[int, NDArray[Any]] = {}

        def note_overflow(f: Any) -> None:
            for v in f.inputs:
                if storage is not None and (key := self._key_of_grad.get(hash(v.grad))) is not None:
                    before = sums.get(key, 0.0)
                    sums[key] = np.array(v.grad.data, np.float64)
                    is_beyond = np.abs(sums[key] - before) > storage.gradient_format(key, v.size).max
                    overflowed[key] = overflowed.get(key, False) | is_beyond

        backward = partial(backward, scale, function_post_hook=note_overflow)
        arrays = self._run(partial(self._forward, loss, index), backward, pre)
        for key, elements in overflowed.items():
            arrays[key][elements] = np.inf
        return {key: array.astype(np.float64) / scale for key, array in arrays.items()}

    def adaptive(self, scaling: AdaptiveLossScaling, index: int) -> Gradients:
        """Run a batch with measured scales until they fit, as the updater does."""
        arrays: Gradients = {}

        def run_pass(rerun: bool) -> None:
            backward = partial(scaling.backward, None, iteration=index, rerun=rerun)
            arrays.update(self._run(partial(self._forward, scaling.loss, index), backward))

        scaling.guard.begin()
        scaling.guard.begin_batch(first=True)
        smallest_scale = scaling.components.policy.min_scale
        BatchLoop(scaling, run_pass, self._weights.values, smallest_scale).run(Rules(True, _REPEATS))
        scaling.after_update()
        # Gradients of outputs still have their scales; the engine has unscaled those of weights.
        scales = {key: scaling.scale_of(v) for key, v in self._outputs.items()}
        return {key: array.astype(np.float64) / scales.get(key, 1.0) for key, array in arrays.items()}

    def _run(self, forward: Forward, backward: Callable[..., None], pre: Optional[Hook] = None) -> Gradients:
        """Run a pass with a hook before each function's backward, and copy the gradients of layers."""
        arrays: Gradients = {}
        last: Any = None

        def before_function(f: Any) -> None:
            nonlocal last
            last = f
            own = (v for v in f.outputs if hash(v) in self._outputs)  # their gradients are complete now
            arrays.update((hash(v), np.array(v.grad.data, np.float32)) for v in own)
            if pre is not None:
                pre(f)

        forward()  # again for each backward, as backward frees results of forward, such as a dropout's mask
        for v in self._weights.values():
            v.grad.zero()
        try:
            backward(function_pre_hook=before_function)
        except RuntimeError as error:
            has_no_backward = any(words in str(error) for words in ("not_implemented", "propagate_down"))
            if last is not None and has_no_backward:
                raise NoBackward(last, str(error).strip().rpartition("\n")[2]) from error
            raise
        arrays.update((key, np.array(v.grad.data, np.float32)) for key, v in self._weights.items())
        return arrays


class StorageEffect(NamedTuple):
    """Effect of storing a layer's gradients with one way of scaling.

    Attributes:
        underflow: share of the elements that are nonzero in fp32 and zero as stored, by losses on the way,
            too.
        overflow: share of the elements that are finite in fp32 and are not as stored.
        error: relative error of the weight gradient against fp32 (of the output gradient where there is no
            weight), as the ratio of Euclidean norms; infinite if any is not finite.
        lost_units: share of the nonzero rows or columns of a weight gradient that are zero as stored, in all
            batches.
    """

    underflow: float
    overflow: float
    error: float
    lost_units: float = 0.0


class Tally:
    """Counts of the effect of storing gradients in one way, by key, summed over batches."""

    def __init__(self, keys: Iterable[int]) -> None:
        self._sums: Dict[int, NDArray[np.float64]] = {key: np.zeros(6) for key in keys}
        # Rows that were nonzero in any batch, and as stored; and likewise columns.
        self._units: Dict[int, List[NDArray[np.bool_]]] = {}

    def add(self, stored: Gradients, fp32: Gradients, unstored: Optional[Gradients] = None) -> None:
        """Add a batch: errors against `fp32`; losses and overflows against `unstored`, by default `fp32`."""
        for key, sums in self._sums.items():
            complete, rounded = (fp32 if unstored is None else unstored)[key], stored[key]
            finite = np.isfinite(complete)
            nonzero = finite & (complete != 0.0)
            counted = nonzero, nonzero & (rounded == 0.0), finite, finite & ~np.isfinite(rounded)
            with np.errstate(invalid="ignore", over="ignore"):
                squares = np.sum((rounded - fp32[key]) ** 2), np.sum(fp32[key] ** 2)
                sums += [*map(np.count_nonzero, counted), *squares]
            if complete.ndim > 1:
                units = [(x != 0.0).any(axis=(*range(1, x.ndim),)) for x in (complete, rounded)]
                units += [(x != 0.0).any(axis=(*range(x.ndim - 1),)) for x in (complete, rounded)]
                self._units[key] = [a | b for a, b in zip(self._units.get(key, units), units)]

    def nonzero(self, layer: Layer) -> int:
        """Number of nonzero elements in the gradients of a layer's weights, or else outputs."""
        return int(sum(self._sums[key][_NONZERO] for key in layer.weights or layer.outputs))

    def differing(self, share: float) -> Set[int]:
        """Keys of finite gradients that differ from fp32 by more than this share."""
        errors = ((key, sums[_SQUARED_ERROR], share**2 * sums[_SQUARED]) for key, sums in self._sums.items())
        return {key for key, error, limit in errors if math.inf > error > limit}

    def zeros(self) -> Set[int]:
        """Keys of the gradients that are exactly 0 in fp32."""
        return {key for key, sums in self._sums.items() if not sums[_SQUARED]}

    def of(self, layer: Layer) -> StorageEffect:
        """Effect on all gradients of a layer; the error is that of its weights, if it has any."""
        return self.effect((*layer.outputs, *layer.weights), layer.weights or layer.outputs)

    def worst(self, layer: Layer, left_out: Set[int]) -> StorageEffect:
        """Worst effect on a parameter of a layer, as a large bias would hide its weight in a sum."""
        # Of parameters that are left out, and of vectors whose gradients cancel, only overflow is judged.
        parts = ((key, self._sums[key]) for key in layer.weights)
        squares = {key: sums[_SQUARED] / max(sums[_FINITE], 1.0) for key, sums in parts}
        least = _CANCELLED**2 * max(squares.values(), default=0.0)
        vectors = (key for key, v in layer.weights.items() if max(v.shape, default=1) == v.size)
        left_out = left_out | {key for key in vectors if squares[key] < least}
        effects = []
        for part in [[key] for key in layer.weights] or [[*layer.outputs]]:
            own = self.effect(part, part)
            if not left_out.isdisjoint(part):
                own = StorageEffect(0.0, own.overflow, 0.0)
            elif layer.weights:
                units = self._units.get(part[0], [])
                # Share of the nonzero rows, or columns if more, of which storage keeps nothing.
                pairs = zip(units[::2], units[1::2])
                lost = (np.count_nonzero(a & ~b) / max(np.count_nonzero(a), 1) for a, b in pairs)
                own = own._replace(lost_units=max(lost, default=0.0))
            effects.append(own)
        return StorageEffect(*map(max, zip(*effects)))

    def effect(self, counted: Iterable[int], compared: Iterable[int]) -> StorageEffect:
        """Effect: shares of the elements of `counted` gradients, and the error of `compared` ones, by key."""
        nonzero, lost, finite, overflowed, *_ = np.sum([self._sums[key] for key in counted], axis=0).tolist()
        *_, squared_error, squared = np.sum([self._sums[key] for key in compared], axis=0).tolist()
        error = math.inf if squared_error else 0.0
        if squared and math.isfinite(squared_error):
            error = math.sqrt(squared_error / squared)
        return StorageEffect(lost / max(nonzero, 1.0), overflowed / max(finite, 1.0), error)


class FormatTrial:
    """Trial of each way of scaling in one format, `plain` for one scale; `amaxes`: of gradients, by key."""

    def __init__(
        self, passes: Passes, emulation: FormatEmulation, plain: FormatEmulation, amaxes: Dict[int, float]
    ) -> None:
        u_max = emulation.precisions.narrowest.stored_gradients.max
        # Other gradients, those of the float tail, stay in fp32.
        stored = plain.emulated_storage.rounded_gradients()
        limits = ((size, u_max if key in stored else FLOAT32.max) for key, size in amaxes.items() if size)
        one = min((HistoryPolicy().scale(size, u_max=limit) for size, limit in limits), default=1.0)
        self.scales: Dict[Way, float] = {Way.NONE: 1.0, Way.CONSTANT: 65536.0, Way.ONE: one}
        keys = [key for layer in passes.layers for key in layer.weights or layer.outputs]
        # Effect of each way, and of activations and weights alone, with gradients in fp32.
        self._tallies, self.floor = {way: Tally(keys) for way in Way}, Tally(keys)
        self._passes, self._emulation, self._plain = passes, emulation, plain
        self._adaptive = AdaptiveLossScaling(emulation)
        # By way and key of a gradient: counts of nonzero elements, and of those that underflow or overflow.
        self._rounded: Dict[Way, Dict[int, Counter[str]]] = {way: {} for way in Way}

    def compare(self, index: int, in_fp32: Gradients) -> None:
        """Compare every way of scaling on one batch."""
        passes, emulation = self._passes, self._emulation
        # They, too, come from stored activations: a way differs from them by losses in stored gradients.
        unstored = passes.with_one_scale(emulation, index, round_gradients=False)
        self.floor.add(unstored, in_fp32)
        for way, tally in self._tallies.items():
            used = self._plain
            if way is Way.ADAPTIVE:
                stored, used = passes.adaptive(self._adaptive, index), emulation
            else:
                stored = passes.with_one_scale(used, index, self.scales[way])
            tally.add(stored, in_fp32, unstored)
            for key, seen in used.emulated_storage.gradients.items():
                counted = self._rounded[way].setdefault(key, Counter())
                counted.update(nonzero=seen.nonzero, underflow=seen.underflowed, overflow=seen.overflowed)

    def effects(self, layer: Layer, left_out: Set[int]) -> Dict[Way, StorageEffect]:
        """Effect of each way on a layer's worst parameter; of gradients that are left out, overflow alone."""
        return {way: tally.worst(layer, left_out) for way, tally in self._tallies.items()}

    def begins(self, network: Network, layer: Layer, way: Way, effect: StorageEffect) -> str:
        """List the functions, the first on each path from the loss, that lose a layer's gradient."""
        kind, counts = "overflow" if effect.overflow else "underflow", self._rounded[way]
        gone = {key for key, counted in counts.items() if not counted["nonzero"] > counted["underflow"]}
        behind = set(network.behind(layer.outputs or layer.weights))

        def onward(f: Any) -> List[nn.Variable]:
            """Inputs through which the gradient, unless it is gone, continues from `f` to the layer."""
            if f not in behind or gone.issuperset(map(hash, f.outputs)):
                return []
            return [v for v in f.inputs if v.parent in behind]

        def first(least: float) -> List[Any]:
            """Functions, the first from the loss, that lose more than a share of a gradient."""
            losing = {key for key, one in counts.items() if one[kind] > least * one["nonzero"]}
            ends = {f for f in behind if not losing.isdisjoint(map(hash, onward(f)))}
            walked = network.walk(network.last, lambda f: [] if f in ends else onward(f))
            lost_weights = losing & layer.weights.keys()
            own = (f for f in behind if not lost_weights.isdisjoint(map(hash, f.inputs)))
            return [f for f in walked if f in ends] or list(own)

        if effect.overflow:
            return network.listed(first(0.0))
        # Functions that lose most of it; if there are none, those that lose a part.
        return network.listed(first(max(_BEGINS * effect.underflow, 0.01)) or first(0.01))

    def losing(self, network: Network, layer: Layer, way: Way, left_out: Set[int]) -> str:
        """List the parameters of a layer that lose; empty if all do, and the layer's name tells which."""
        judged = (key for key in layer.weights if key not in left_out)
        effects = {key: self._tallies[way].effect([key], [key]) for key in judged}
        found = [key for key, own in effects.items() if own.overflow or own.error > TOLERANCE]
        names = [network.names.get(key, "an input") for key in found]
        # The name of a layer that only reshapes a parameter, such as "Reshape", does not tell which.
        tells = any(layer.name.startswith(scope_of(name)) for name in names)
        return "" if tells and len(found) == len(effects) else ", ".join(names)
