# SPDX-License-Identifier: Apache-2.0
"""A storage that rounds what is written to it, and knows what it flushed, and one that rounds nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Callable, ClassVar, Dict, FrozenSet, Mapping, Optional

import nnabla as nn

from ..core.formats import Format
from ..core.precision import LayerPrecisions, Precision
from ..core.statistics import ArrayStatistics
from ..kernels.arrays import FLOAT32, float32_copy, stored_dtype
from ..kernels.interface import Kernels, RoundingStatistics


@dataclass
class Draws:
    """How many streams of random bits were drawn from; those who share this never draw from the same."""

    undone: ClassVar = ("count",)
    count: int = 0


class NativeStorage:
    """Stores arrays as they are: it has nothing to tell of them."""

    rounds = False
    """Whether arrays are rounded, and looked at, as they are stored."""

    narrowest: Optional[Precision] = None
    """The narrowest precision that anything is stored in, if that is not the context's."""

    largest_weight = math.inf
    """The largest magnitude that the scaled copy of any weight may hold."""

    largest_single = 0.0
    """The largest magnitude of a gradient of one element, where that has a format of its own."""

    def __init__(self) -> None:
        # Rounded copies that stand in for leaves while the graph runs.
        self.weights: Dict[int, nn.NdArray] = {}
        # What rounding last did to gradients, and to weights and activations.
        self.gradients: Dict[int, RoundingStatistics] = {}
        self.data: Dict[int, RoundingStatistics] = {}
        # What to do when the gradients of a function have been rounded, by its key.
        self.after: Mapping[int, Callable[[], None]] = {}
        # Storages of one training share it.
        self.drawn = Draws()
        # Tells the keys of the variables whose gradients are stored in the format.
        self.rounded_gradients: Callable[[], FrozenSet[int]] = frozenset

    def data_format(self, key: int, size: int) -> Optional[Format]:
        """The format that the data of a variable of `size` elements is rounded to, or None."""
        return None

    def gradient_format(self, key: int, size: int) -> Optional[Format]:
        """The format that the gradient of a variable of `size` elements is rounded to, or None."""
        return None

    def copy_format(self, key: int, size: int) -> Optional[Format]:
        """The format that the scaled copy of a weight of `size` elements is rounded to, or None."""
        return None

    def gradient_statistics(self, key: int) -> Optional[ArrayStatistics]:
        """The statistics of a gradient as last rounded, or None."""
        known = self.gradients.get(key)
        return known and known.statistics

    def data_statistics(self, key: int) -> Optional[ArrayStatistics]:
        """The statistics of a weight or activation as last rounded, or None."""
        known = self.data.get(key)
        return known and known.statistics

    def rounds_gradient(self, leaf: nn.Variable) -> bool:
        """Whether the gradient of a leaf is rounded after each function that writes it."""
        stored = self.gradient_format(hash(leaf), leaf.size)
        return stored is not None and stored.rounds_float32

    def store_gradient(self, key: int, array: nn.NdArray) -> None:
        """Store a gradient again that was scaled in place."""

    def store(self, key: int, array: nn.NdArray) -> None:
        """Store the scaled copy of the weight `key`."""


class RoundedStorage(NativeStorage):
    """Rounds arrays to the formats of their precision; keeps the last statistics of each, by variable key."""

    rounds = True

    def __init__(self, precisions: LayerPrecisions, kernels: Kernels) -> None:
        super().__init__()
        self.precisions = precisions
        self.narrowest = precisions.narrowest
        self.largest_weight = precisions.narrowest.stored_data.max
        # Gradients of one element are never stored in 8 bits.
        self.largest_single = precisions.narrowest.gradient_format(1).max
        self.kernels = kernels
        # The precision of each variable, by key, where layers differ.
        self.of_variables: Mapping[int, Precision] = {}
        # That of variables which a graph does not know is the most careful one.
        self._default = precisions.only or precisions.narrowest

    def precision_of(self, key: int) -> Precision:
        """The precision of a variable."""
        return self.of_variables.get(key, self._default)

    def data_format(self, key: int, size: int) -> Format:
        """The format that the data of a variable of `size` elements is stored in."""
        return self.precision_of(key).data_format(size)

    def gradient_format(self, key: int, size: int) -> Format:
        """The format that the gradient of a variable of `size` elements is stored in."""
        return self.precision_of(key).gradient_format(size)

    def copy_format(self, key: int, size: int) -> Optional[Format]:
        """The format that the scaled copy of a weight is stored in; None where its reader rounds operands."""
        precision = self.precision_of(key)
        return None if precision.operands_only else precision.data_format(size)

    def round_gradient(self, key: int, array: nn.NdArray) -> None:
        """Round the gradient of the variable `key`; unwritten and non-float32 arrays stay as they are."""
        if stored_dtype(array) == FLOAT32:
            precision = self.of_variables.get(key, self._default)
            storage, random_key = precision.gradient_format(array.size), None
            # With `operands_only`, `backward` is what operands have, not what is stored.
            if storage is precision.backward and not precision.operands_only:
                random_key = self._random_key(precision)
            self.gradients[key] = self.kernels.round_to_format(array, array, storage, random_key=random_key)

    def round_data(self, key: int, source: nn.NdArray, target: nn.NdArray) -> nn.NdArray:
        """Round the data of `key` into `target`; returns that, or `source` if there is nothing to round."""
        readable = _as_float32(source, target)
        if readable is None:
            return source
        precision = self.of_variables.get(key, self._default)
        self.data[key] = self.kernels.round_to_format(readable, target, precision.data_format(source.size))
        return target

    def round_operand(
        self,
        source: nn.NdArray,
        target: nn.NdArray,
        precision: Precision,
        *,
        holds_gradient: bool,
        fitted: bool = True,
    ) -> Optional[RoundingStatistics]:
        """Write what a function reads of an array to `target`; None when nothing was written."""
        readable = _as_float32(source, target)
        if readable is None:
            return None
        format, random_key = precision.forward if fitted else precision.data_format(source.size), None
        if holds_gradient:
            format, random_key = precision.backward, self._random_key(precision)
        return self.kernels.round_to_format(readable, target, format, fitted=fitted, random_key=random_key)

    def store_gradient(self, key: int, array: nn.NdArray) -> None:
        """Round a gradient again, if it was, that was scaled in place; the counts of the first time stay."""
        before = self.gradients.get(key)
        if before is not None:
            self.round_gradient(key, array)
            now = self.gradients[key]
            self.gradients[key] = RoundingStatistics(
                now.statistics, before.underflowed + now.underflowed, before.overflowed + now.overflowed
            )

    def store(self, key: int, array: nn.NdArray) -> None:
        """Round the scaled copy of the weight `key`."""
        stored = self.copy_format(key, array.size)
        if stored is not None:
            self.kernels.round_to_format(array, array, stored)

    def _random_key(self, precision: Precision) -> Optional[int]:
        if precision.stochastic_seed is None:
            return None
        self.drawn.count += 1
        return precision.random_key(self.drawn.count)


def _as_float32(source: nn.NdArray, copy: nn.NdArray) -> Optional[nn.NdArray]:
    """`source` if it holds float32, else `copy` with its values; None when there is nothing to round."""
    stored = stored_dtype(source)
    # Indices stay as they are.
    if stored is None or (source is copy and stored.kind != "f"):
        return None
    return source if stored == FLOAT32 else float32_copy(source, copy)
