# SPDX-License-Identifier: Apache-2.0
"""Backward passes whose gradients are kept, of each layer, as the layer reads them, and their comparison."""

from __future__ import annotations

import math
from typing import AbstractSet, Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

import nnabla as nn
import numpy as np
from numpy.typing import NDArray

from ..core.verdict import Rules
from ..engine import AdaptiveLossScaling, BatchLoop
from ..graph.loss import Hook, LossLike, root_cause, run_backward
from ..graph.plan import GraphPlan

Forward = Callable[[], None]
Gradients = Dict[int, NDArray[Any]]
"""Of the outputs and the weights of layers, by key, as a pass has stored them, divided by their scales."""

# So often a batch runs again, at most, until its scales hold.
_REPEATS = 19


class Layer(NamedTuple):
    """A function with weights, or a product of activations; its variables go by key."""

    name: str
    type_name: str
    # Those that some function reads, or the loss: nnabla has no gradient for unused last states of an LSTM.
    outputs: Dict[int, nn.Variable]
    # The leaves whose gradients it computes; a weight with several uses belongs to the first.
    weights: Dict[int, nn.Variable]


def layers_of(plan: GraphPlan) -> List[Layer]:
    """The layers of a graph, in forward order."""
    found: List[Layer] = []
    taken: Set[int] = set()
    read = {*plan.readers, *map(hash, plan.roots)}
    for node in sorted(plan.nodes.values(), key=lambda node: node.number):
        if node.scalings or node.leaves:
            weights = {key: v for key, v in zip(node.leaf_keys, node.leaves) if key not in taken}
            taken.update(weights)
            outputs = {key: v for key, v in zip(node.output_keys, node.outputs) if key in read}
            found.append(Layer(node.label, node.type_name, outputs, weights))
    return found


def parameter_layers(plan: GraphPlan) -> List[Layer]:
    """The layers that parameters belong to, each with the outputs of all its uses; without any, all."""
    every = layers_of(plan)
    owners = {key: layer for layer in every for key in layer.weights}
    nodes = {node.label: node for node in plan.nodes.values()}
    for layer in every:
        if not layer.weights and nodes[layer.name].leaves:
            owners[nodes[layer.name].leaf_keys[0]].outputs.update(layer.outputs)
    return [layer for layer in every if layer.weights] or every


class NoBackward(ValueError):
    """A function on the way of a gradient has none in nnabla; `function` is its key."""

    def __init__(self, f: Any) -> None:
        self.function = hash(f)
        super().__init__(f"{f.info.type_name} has no backward: nothing before it can be trained")


class Passes:
    """Runs forward and backward and keeps the gradients of layers.

    Forward runs before each backward, which is free to drop what forward has left: dropout drops its mask. It
    is to draw the same random numbers each time.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._outputs = {key: v for layer in layers for key, v in layer.outputs.items()}
        self._weights = {key: v for layer in layers for key, v in layer.weights.items()}

    def with_one_scale(
        self,
        forward: Forward,
        loss: LossLike,
        scale: float = 1.0,
        pre: Optional[Hook] = None,
        *,
        round_gradients: bool = True,
    ) -> Gradients:
        """Backward of a Variable or its emulation; the hook `pre` looks on. An emulation can leave gradients
        in fp32.

        Raises:
            NoBackward: a function has none.
        """
        arrays: Gradients = {}
        last: Any = None

        def note(f: Any) -> None:
            nonlocal last
            last = f
            self._note(f, arrays)
            if pre is not None:
                pre(f)

        self._begin(forward)
        try:
            if round_gradients:
                run_backward(loss, scale, None, False, None, note, None)
            else:
                emulation: Any = loss
                emulation.backward(scale, function_pre_hook=note, round_gradients=False)
        except RuntimeError as error:
            refused = "not_implemented", "propagate_down"
            if last is not None and any(words in str(error) for words in refused):
                raise NoBackward(last) from error
            raise
        except SystemError as error:
            # nnabla hides an interruption in a function of the user's.
            raise root_cause(error) from None
        self._note_weights(arrays)
        return _unscaled(arrays, dict.fromkeys(arrays, scale))

    def adaptive(self, forward: Forward, scaling: AdaptiveLossScaling, iteration: int) -> Gradients:
        """Backward with measured scales, again until they hold, as the updater does it."""
        arrays: Gradients = {}

        def run_pass(again: bool) -> None:
            self._begin(forward)
            scaling.backward(
                None, function_pre_hook=lambda f: self._note(f, arrays), iteration=iteration, again=again
            )
            self._note_weights(arrays)

        scaling.guard.begin()
        scaling.guard.begin_batch(first=True)
        smallest = scaling.components.policy.min_scale
        BatchLoop(scaling, run_pass, self._weights.values, smallest).run(Rules(True, _REPEATS))
        scaling.after_update()
        # Gradients of weights are unscaled already.
        return _unscaled(arrays, {key: scaling.scale_of(v) for key, v in self._outputs.items()})

    def _begin(self, forward: Forward) -> None:
        forward()
        for v in self._weights.values():
            v.grad.zero()

    def _note(self, f: Any, arrays: Gradients) -> None:
        for v in f.outputs:
            if hash(v) in self._outputs:
                arrays[hash(v)] = np.array(v.grad.data, np.float32)

    def _note_weights(self, arrays: Gradients) -> None:
        arrays.update((key, np.array(v.grad.data, np.float32)) for key, v in self._weights.items())


def _unscaled(arrays: Gradients, scales: Mapping[int, float]) -> Gradients:
    return {key: array.astype(np.float64) / scales.get(key, 1.0) for key, array in arrays.items()}


class Kept(NamedTuple):
    """What storing a layer's gradients with one way of scaling does to them.

    Attributes:
        underflow: share of the elements that are not zero in fp32 and are zero as stored; whatever was lost
            on the way to the layer counts, too.
        overflow: share of the elements that are finite in fp32 and are not as stored.
        error: relative error of the weight gradient against fp32 (of the output gradient where there is no
            weight), as the ratio of Euclidean norms; infinite when something is not finite.
    """

    underflow: float
    overflow: float
    error: float


class Tally:
    """Counts what storing the gradients of one layer in one way has done to them; adds up over batches."""

    def __init__(self) -> None:
        self.nonzero = self._lost = self._finite = self._overflowed = 0
        self._squared_error = self._squared = 0.0

    def add(
        self,
        layer: Layer,
        stored: Gradients,
        fp32: Gradients,
        unstored: Optional[Gradients] = None,
    ) -> None:
        """Take errors against `fp32`, and count what is lost and overflows against `unstored`, if given."""
        for key in (*layer.outputs, *layer.weights):
            complete, rounded = (fp32 if unstored is None else unstored)[key], stored[key]
            finite = np.isfinite(complete)
            nonzero = finite & (complete != 0.0)
            self.nonzero += int(np.count_nonzero(nonzero))
            self._lost += int(np.count_nonzero(nonzero & (rounded == 0.0)))
            self._finite += int(np.count_nonzero(finite))
            self._overflowed += int(np.count_nonzero(finite & ~np.isfinite(rounded)))
        for key in layer.weights or layer.outputs:
            with np.errstate(invalid="ignore", over="ignore"):
                self._squared_error += float(np.sum((stored[key] - fp32[key]) ** 2))
                self._squared += float(np.sum(fp32[key] ** 2))

    def differs(self, share: float) -> bool:
        """Whether gradients of weights are finite, and others than in fp32 by more than a share of these."""
        return math.isfinite(self._squared_error) and self._squared_error > share**2 * self._squared

    @property
    def is_zero(self) -> bool:
        """Whether gradients of weights are exactly 0 in fp32."""
        return not self._squared

    def kept(self) -> Kept:
        """The shares and the error."""
        error = 0.0
        if self._squared_error:
            is_known = math.isfinite(self._squared_error) and self._squared
            error = math.sqrt(self._squared_error / self._squared) if is_known else math.inf
        return Kept(self._lost / max(self.nonzero, 1), self._overflowed / max(self._finite, 1), error)


class Tallies:
    """One for each parameter of each layer: a bias, which is large, tells nothing of the weight."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.parts: Dict[str, List[Tuple[Layer, Tally]]] = {}
        for layer in layers:
            own = [layer._replace(outputs={}, weights={key: v}) for key, v in layer.weights.items()]
            self.parts[layer.name] = [(part, Tally()) for part in own or [layer]]

    def add(self, stored: Gradients, fp32: Gradients, unstored: Optional[Gradients] = None) -> None:
        """See `Tally.add`."""
        for parts in self.parts.values():
            for part, tally in parts:
                tally.add(part, stored, fp32, unstored)

    def weights(self, said: Callable[[Tally], bool]) -> Set[int]:
        """Keys of the parameters of which something is true."""
        parts = (one for parts in self.parts.values() for one in parts)
        return {key for part, tally in parts if said(tally) for key in part.weights}

    def kept(self, name: str, but: AbstractSet[int]) -> Kept:
        """Of the parameters of a layer the worst, without some, by key."""
        kept = [tally.kept() for part, tally in self.parts[name] if but.isdisjoint(part.weights)]
        return Kept(*map(max, zip(*kept))) if kept else Kept(0.0, 0.0, 0.0)
