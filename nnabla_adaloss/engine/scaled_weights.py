# SPDX-License-Identifier: Apache-2.0
"""Weights that are replaced by scaled copies for a function, or for a whole pass, and restored."""

from __future__ import annotations

from typing import List, Sequence, Tuple

import nnabla as nn

from ..core.components import LayerInput
from ..core.power_of_two import is_power_of_two
from ..graph.graph import Graph
from ..kernels.arrays import are_readable, as_float32
from ..kernels.interface import ScaledCopies
from .prepared_graph import PreparedGraph


class SwappedWeights:
    """Weights to swap for scaled copies, for a function or, with one schedule, for a whole pass."""

    def __init__(self, graph: Graph, scaled: Sequence[Tuple[LayerInput, float]]) -> None:
        self.variables = [graph.variables[layer_input.weight] for layer_input, _ in scaled]
        self.keys = [graph.keys[layer_input.weight] for layer_input, _ in scaled]
        self.shapes = [variable.shape for variable in self.variables]
        half = [layer_input.half for layer_input, _ in scaled]
        self.copies = ScaledCopies((), (), [alpha for _, alpha in scaled], half)


class ScaledWeights:
    """Replaces weights by alpha times the weight, and restores them."""

    def __init__(self, prepared: PreparedGraph) -> None:
        self._kernels, self._pool, self._storage = prepared.kernels, prepared.pool, prepared.storage
        self._swapped: List[Tuple[nn.Variable, nn.NdArray, nn.NdArray]] = []
        # Keys, and rounded weights of an emulation that scaled copies replace in `storage.weights`.
        self._replaced: List[Tuple[int, nn.NdArray]] = []

    def swap(self, weights: SwappedWeights) -> None:
        """Swap weights for scaled copies, until `restore`."""
        storage, copies, scratch, shapes = self._storage, weights.copies, self._pool.get, weights.shapes
        own = readable = [variable.data for variable in weights.variables]
        if not are_readable(own):  # as those that a user has set in float64
            floats = (scratch(shape, "float32", index) for index, shape in enumerate(shapes))
            readable = list(map(as_float32, own, floats))
        # An emulation has rounded weights, which are copied instead of the Variables' own.
        rounded = [storage.weights.get(key) for key in weights.keys]
        copies.sources = [array or source for array, source in zip(rounded, readable)]
        copies.targets = [scratch(shape, "scaled weight", index) for index, shape in enumerate(shapes)]
        self._kernels.scaled_copy_all(copies)
        for key, scaled, alpha in zip(weights.keys, copies.targets, copies.alphas):
            # A rounded weight times 2 keeps all bits; times 1/2 or 1.5 it may not, and is rounded again.
            if alpha < 1.0 or not is_power_of_two(alpha):
                storage.store(key, scaled)
        # Each swap is noted before it is made: a signal may interrupt between any two lines.
        swaps = zip(weights.keys, rounded, weights.variables, own, copies.targets)
        for key, array, variable, source, scaled in swaps:
            if array is None or source == array:
                self._swapped.append((variable, source, scaled))
                variable.data = scaled
            else:
                # The emulation's backward begins later, and puts arrays of `storage.weights` into Variables.
                self._replaced.append((key, array))
                storage.weights[key] = scaled

    def restore(self) -> None:
        """Restore all swapped arrays, if any."""
        # Entries are dropped after restoring: a signal may interrupt between any two lines. If an emulation's
        # backward has ended, its Variables have fp32 weights again, and must not get the rounded ones.
        while self._swapped:
            variable, source, scaled = self._swapped[-1]
            if variable.data == scaled:
                variable.data = source
            self._swapped.pop()
        while self._replaced:
            key, rounded = self._replaced[-1]
            self._storage.weights[key] = rounded
            self._replaced.pop()
