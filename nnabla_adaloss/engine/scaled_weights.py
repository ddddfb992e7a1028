# SPDX-License-Identifier: Apache-2.0
"""Weights that are replaced by scaled copies for a function, or for a whole pass, and restored."""

from __future__ import annotations

from typing import List, Sequence, Tuple

import nnabla as nn

from ..core.components import LayerInput
from ..emulation.rounded_storage import NativeStorage
from ..graph.graph import Graph
from ..kernels.arrays import ScratchPool, are_readable, as_float32
from ..kernels.interface import Kernels, ScaledCopies


class SwappedWeights:
    """Weights that are swapped for a whole pass, with one schedule."""

    def __init__(self, graph: Graph, scaled: Sequence[Tuple[LayerInput, float]]) -> None:
        self.variables = [graph.variables[layer_input.weight] for layer_input, _ in scaled]
        self.keys = [graph.keys[layer_input.weight] for layer_input, _ in scaled]
        self.shapes = [variable.shape for variable in self.variables]
        half = [layer_input.half for layer_input, _ in scaled]
        self.copies = ScaledCopies((), (), [alpha for _, alpha in scaled], half)


class ScaledWeights:
    """Replaces weights by alpha times the weight for functions, and restores them."""

    def __init__(self, kernels: Kernels, pool: ScratchPool, storage: NativeStorage) -> None:
        self._kernels, self._pool, self._storage = kernels, pool, storage
        self._swapped: List[Tuple[nn.Variable, nn.NdArray, nn.NdArray]] = []
        # Rounded weights of an emulation, by key, for which it swaps in scaled copies.
        self._replaced: List[Tuple[int, nn.NdArray]] = []

    def swap(self, graph: Graph, layer_input: LayerInput, alpha: float, index: int) -> None:
        """Swap the weight of the next function's layer number `index` for a scaled copy, until `restore`."""
        variable = graph.variables[layer_input.weight]
        source = variable.data
        scaled = self._pool.get(variable.shape, "scaled weight", index)
        # In the dtype that the function reads: nnabla's conversion would take another pass over it.
        self._kernels.scaled_copy(self._readable(source, 0), scaled, alpha, half=layer_input.half)
        self._store(graph.keys[layer_input.weight], scaled, alpha)
        self._swapped.append((variable, source, scaled))
        variable.data = scaled

    def swap_all(self, weights: SwappedWeights) -> None:
        """Swap all weights for scaled copies, until `restore`."""
        storage, copies = self._storage, weights.copies
        sources = [variable.data for variable in weights.variables]
        copies.targets = targets = [
            self._pool.get(shape, "scaled weight", index) for index, shape in enumerate(weights.shapes)
        ]
        readable = sources
        if not are_readable(sources):
            readable = [self._readable(source, index) for index, source in enumerate(sources)]
        # Backward of an emulation first puts its rounded weights into Variables: copies replace them there.
        # In `swap`, within backward, the Variable holds the rounded weight already.
        rounded = [storage.weights.get(key) for key in weights.keys]
        copies.sources = [array or source for array, source in zip(rounded, readable)]
        self._kernels.scaled_copy_all(copies)
        for key, scaled, alpha in zip(weights.keys, targets, copies.alphas):
            self._store(key, scaled, alpha)
        # Each swap is noted before it is made: a signal may interrupt between any two lines.
        swaps = zip(weights.keys, rounded, weights.variables, sources, targets)
        for key, array, variable, source, scaled in swaps:
            if array is not None:
                self._replaced.append((key, array))
                storage.weights[key] = scaled
            else:
                self._swapped.append((variable, source, scaled))
                variable.data = scaled

    def restore(self) -> None:
        """Restore all swapped arrays, if any."""
        # Dropped after restoring: a signal may interrupt between any two lines. An array that was restored
        # already (by an emulation, to its fp32 weight) stays.
        while self._swapped:
            variable, source, scaled = self._swapped[-1]
            if variable.data == scaled:
                variable.data = source
            self._swapped.pop()
        while self._replaced:
            key, rounded = self._replaced[-1]
            self._storage.weights[key] = rounded
            self._replaced.pop()

    def _store(self, key: int, scaled: nn.NdArray, alpha: float) -> None:
        """Round a copy as an emulation stores it."""
        # Enlarging by a power of two keeps all bits of a rounded weight; shrinking may make some subnormal.
        if alpha < 1.0:
            self._storage.store(key, scaled)

    def _readable(self, array: nn.NdArray, index: int) -> nn.NdArray:
        return as_float32(array, self._pool.get(array.shape, "float32", index))
