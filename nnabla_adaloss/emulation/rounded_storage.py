# SPDX-License-Identifier: Apache-2.0
"""Storage that rounds arrays and counts their underflow and overflow, and one that leaves them unchanged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, ClassVar, Dict, FrozenSet, Mapping, Optional

import nnabla as nn

from ..core.formats import Format
from ..core.precision import LayerPrecisions, Precision
from ..kernels.arrays import FLOAT32, float32_copy, stored_dtype
from ..kernels.interface import Kernels, RoundingStatistics
from .rounding_plan import Operand


@dataclass
class Draws:
    """Number of streams of random bits used; those who share this never use the same stream."""

    undone: ClassVar = ("count",)  # restored from a `savepoint`
    count: int = 0


class NativeStorage:
    """Storage of the context, which rounds and measures nothing; base of the one that rounds."""

    rounds = False  # True if arrays are rounded and measured when stored
    by_layer: Mapping[str, Precision] = {}  # by pattern of layer names; empty: that of the context
    narrowest: Optional[Precision] = None  # of all arrays; None: that of the context

    def __init__(self) -> None:
        # Rounded copies that replace leaves while the graph runs.
        self.weights: Dict[int, nn.NdArray] = {}
        # Statistics of the last rounding of gradients, and of weights and activations.
        self.gradients: Dict[int, RoundingStatistics] = {}
        self.data: Dict[int, RoundingStatistics] = {}
        # Shared by all storages of a training.
        self.random_draws = Draws()
        # Returns the keys of variables whose gradients are stored in the format.
        self.rounded_gradients: Callable[[], FrozenSet[int]] = frozenset

    def data_format(self, key: int, size: int) -> Optional[Format]:
        """Format to which the data of a variable of `size` elements is rounded, or None."""
        return None

    def gradient_format(self, key: int, size: int) -> Optional[Format]:
        """Format to which the gradient of a variable of `size` elements is rounded, or None."""
        return None

    def copy_format(self, key: int, size: int) -> Optional[Format]:
        """Format to which the scaled copy of a weight of `size` elements is rounded, or None."""
        return None

    def rounds_gradient(self, leaf: nn.Variable) -> bool:
        """True if the gradient of a leaf is rounded after each function that writes it."""
        stored = self.gradient_format(hash(leaf), leaf.size)
        return stored is not None and stored.rounds_float32

    def store_gradient(self, key: int, array: nn.NdArray) -> None:
        """Store a gradient again after it was scaled in place."""

    def store(self, key: int, array: nn.NdArray) -> None:
        """Store the scaled copy of the weight `key`."""


class RoundedStorage(NativeStorage):
    """Rounds arrays to the formats of their precision; keeps the last statistics of each, by variable key."""

    rounds = True

    def __init__(self, precisions: LayerPrecisions, kernels: Kernels) -> None:
        super().__init__()
        self.precisions = precisions
        self.narrowest, self.by_layer = precisions.narrowest, precisions.storage
        self.kernels = kernels
        # Precision of each variable, by key, where layers differ; set by the emulation, for each graph.
        self.of_variables: Mapping[int, Precision] = {}

    def precision_of(self, key: int) -> Precision:
        """Precision of a variable; outside the graph the narrowest, for which no scale is too high."""
        return self.of_variables.get(key, self.precisions.narrowest)

    def data_format(self, key: int, size: int) -> Format:
        return self.precision_of(key).data_format(size)

    def gradient_format(self, key: int, size: int) -> Format:
        return self.precision_of(key).gradient_format(size)

    def copy_format(self, key: int, size: int) -> Optional[Format]:
        precision = self.precision_of(key)
        # Layers with `operands_only` round the copy as an operand, when they read it.
        return None if precision.operands_only else precision.data_format(size)

    def round_gradient(self, key: int, array: nn.NdArray) -> None:
        """Round the gradient of the variable `key`; unwritten and non-float32 arrays do not change."""
        if stored_dtype(array) == FLOAT32:
            precision = self.precision_of(key)
            storage, random_key = precision.gradient_format(array.size), None
            # With `operands_only`, `backward` is the format of operands, not of storage.
            if storage is precision.backward and not precision.operands_only:
                random_key = self._random_key(precision)
            self.gradients[key] = self.kernels.round_to_format(array, array, storage, random_key=random_key)

    def round_data(self, key: int, source: nn.NdArray, target: nn.NdArray) -> nn.NdArray:
        """Round data into `target`, for outputs the `source` itself; return it, or an unrounded `source`."""
        readable = _as_float32(source, target)
        if readable is None:
            return source
        precision = self.precision_of(key)
        self.data[key] = self.kernels.round_to_format(readable, target, precision.data_format(source.size))
        return target

    def round_operand(
        self, source: nn.NdArray, target: nn.NdArray, operand: Operand
    ) -> Optional[RoundingStatistics]:
        """Write a rounded copy of an operand's array to `target`; None when nothing was written."""
        readable = _as_float32(source, target)
        if readable is None:
            return None
        random_key = self._random_key(operand.precision) if operand.holds_gradient else None
        return self.kernels.round_to_format(
            readable, target, operand.format, fitted=operand.fitted, random_key=random_key
        )

    def store_gradient(self, key: int, array: nn.NdArray) -> None:
        """Round a gradient of this pass again after it was scaled in place, and add the counts."""
        # An element that was lost before is 0 or infinite now, and not counted again.
        before = self.gradients.get(key)
        if before is not None:
            self.round_gradient(key, array)
            now = self.gradients[key]
            self.gradients[key] = RoundingStatistics(
                now.statistics, before.underflowed + now.underflowed, before.overflowed + now.overflowed
            )

    def store(self, key: int, array: nn.NdArray) -> None:
        stored = self.copy_format(key, array.size)
        if stored is not None:
            self.kernels.round_to_format(array, array, stored)

    def _random_key(self, precision: Precision) -> Optional[int]:
        """Key of the next stream of random bits; None without random rounding."""
        if precision.stochastic_seed is None:
            return None
        self.random_draws.count += 1
        return precision.random_key(self.random_draws.count)


def _as_float32(source: nn.NdArray, copy: nn.NdArray) -> Optional[nn.NdArray]:
    """Return `source` if it is float32, else `copy` with its values; None if it must not be rounded."""
    stored = stored_dtype(source)
    # Integers that a function wrote are indices; those of a leaf are data.
    if stored is None or (source is copy and stored.kind != "f"):
        return None
    return source if stored == FLOAT32 else float32_copy(source, copy)
