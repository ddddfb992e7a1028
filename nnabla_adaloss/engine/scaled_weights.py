# SPDX-License-Identifier: Apache-2.0
"""Weights that are swapped for scaled copies while a function's backward reads them."""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Sequence, Tuple

import nnabla as nn

from ..graph.node import Scaling
from ..kernels.arrays import are_readable, as_float32
from ..kernels.interface import Kernels, ScaledCopy
from ..kernels.scratch import ScratchPool
from .emulated_storage import EmulatedStorage


class SwappedFactor(NamedTuple):
    """A factor that is swapped for all of a backward pass.

    Attributes:
        layer: name of the layer; the first in backward order, of several that share it.
        variable: the factor.
        key: its key.
        alpha: what it is multiplied by.
        half: whether it is read in half precision.
        shape: its shape.
    """

    layer: str
    variable: nn.Variable
    key: int
    alpha: float
    half: bool
    shape: Tuple[int, ...]


class ScaledWeights:
    """Hands functions alpha times a weight in place of the weight, and puts the weight back.

    Args:
        kernels: the kernels that copy.
        pool: where the copies are.
        storage: an emulated storage, which rounds them; or None.
    """

    def __init__(self, kernels: Kernels, pool: ScratchPool, storage: Optional[EmulatedStorage]) -> None:
        self._kernels = kernels
        self._pool = pool
        self._storage = storage
        self._swapped: List[Tuple[nn.Variable, nn.NdArray, nn.NdArray]] = []
        # Copies that an emulation swaps in by itself, in place of its rounded weights.
        self._stand_ins: List[Tuple[int, nn.NdArray]] = []

    def swap(self, scaling: Scaling, alpha: float, index: int) -> None:
        """Swap the factor of one layer, for the function that runs next.

        Args:
            scaling: the layer.
            alpha: what its factor is multiplied by.
            index: which of the function's factors it is.
        """
        factor = scaling.factor
        source = factor.data
        scaled = self._pool.get(factor.shape, "factor", index)
        # In the type that the function reads: nnabla would convert it, with another pass over it.
        self._kernels.scaled_copy(self._readable(source, 0), scaled, alpha, half=scaling.half)
        self._store(scaling.factor_key, scaled, alpha)
        self._swapped.append((factor, source, scaled))
        factor.data = scaled

    def swap_all(self, factors: Sequence[SwappedFactor]) -> None:
        """Swap the factors of many layers, for all of a backward pass."""
        weights = {} if self._storage is None else self._storage.weights
        readable = sources = [factor.variable.data for factor in factors]
        if not are_readable(sources):
            readable = [self._readable(source, index) for index, source in enumerate(sources)]
        copies, swapped = [], []
        for index, (source, (_, factor, key, alpha, half, shape)) in enumerate(zip(sources, factors)):
            scaled = self._pool.get(shape, "factor", index)
            rounded = weights.get(key)
            copies.append(ScaledCopy(rounded or readable[index], scaled, alpha, half))
            swapped.append((key, rounded, factor, source, scaled))
        self._kernels.scaled_copy_all(copies)
        if self._storage is not None:
            for (_, scaled, alpha, _), factor in zip(copies, factors):
                self._store(factor.key, scaled, alpha)
        for key, rounded, factor, source, scaled in swapped:
            # Noted before it is swapped: a signal may interrupt us between any two lines.
            if rounded is not None:
                self._stand_ins.append((key, rounded))
                weights[key] = scaled
            else:
                self._swapped.append((factor, source, scaled))
                factor.data = scaled

    def restore(self) -> None:
        """Put everything back; harmless when nothing is swapped."""
        # Forgotten after it is put back, for the same reason. What somebody else put back already (an
        # emulation, to its own master) stays.
        while self._swapped:
            variable, source, scaled = self._swapped[-1]
            if variable.data == scaled:
                variable.data = source
            self._swapped.pop()
        while self._stand_ins and self._storage is not None:
            key, rounded = self._stand_ins[-1]
            self._storage.weights[key] = rounded
            self._stand_ins.pop()

    def _store(self, key: int, scaled: nn.NdArray, alpha: float) -> None:
        if self._storage is not None and alpha < 1.0:
            self._storage.store(key, scaled)

    def _readable(self, array: nn.NdArray, index: int) -> nn.NdArray:
        return as_float32(array, self._pool.get(array.shape, "float32", index))
