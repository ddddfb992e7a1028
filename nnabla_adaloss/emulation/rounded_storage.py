# SPDX-License-Identifier: Apache-2.0
"""A storage that rounds what is written to it, and knows what it flushed to zero or to infinity."""

from __future__ import annotations

from typing import Dict, Optional

import nnabla as nn

from ..core.precision import Precision
from ..core.random_streams import Draws, stream_key
from ..core.statistics import ArrayStatistics
from ..kernels.arrays import FLOAT32, stored_dtype
from ..kernels.interface import Kernels, RoundingStatistics


class RoundedStorage:
    """Rounds arrays to the formats of a precision and keeps the last statistics of each, by variable key.

    Args:
        precision: the formats that are emulated.
        kernels: the kernels that round.

    Attributes:
        weights: rounded copies that stand in for leaves while the graph runs.
        drawn: how many arrays were rounded at random so far; storages of one training share it.
    """

    def __init__(self, precision: Precision, kernels: Kernels) -> None:
        self.precision = precision
        self.kernels = kernels
        self.weights: Dict[int, nn.NdArray] = {}
        self.gradients: Dict[int, RoundingStatistics] = {}
        self.data: Dict[int, RoundingStatistics] = {}
        self.drawn = Draws()
        # With `operands_only` these are products' operands, not what is stored.
        self._at_random = None if precision.operands_only else precision.backward

    @property
    def draws(self) -> int:
        """How many arrays were rounded at random so far. It chooses the random numbers, together with the
        seed: set it to go on where another run was.
        """
        return self.drawn.count

    @draws.setter
    def draws(self, count: int) -> None:
        self.drawn.count = count

    def round_gradient(self, key: int, array: nn.NdArray) -> None:
        """Round the gradient of the variable `key`; unwritten and non-float32 arrays stay as they are."""
        if stored_dtype(array) == FLOAT32:
            storage = self.precision.gradient_format(array.size)
            random_key = self._random_key() if storage is self._at_random else None
            self.gradients[key] = self.kernels.round_to_format(array, array, storage, random_key=random_key)

    def round_data(self, key: int, source: nn.NdArray, target: nn.NdArray) -> nn.NdArray:
        """Round the data of the variable `key` into `target`, which may be `source`.

        Returns:
            Where the stored data is: `target`, or `source` when there is nothing to round.
        """
        readable = _as_float32(source, target)
        if readable is None:
            return source
        self.data[key] = self.kernels.round_to_format(
            readable, target, self.precision.data_format(source.size)
        )
        return target

    def round_data_operand(self, source: nn.NdArray, target: nn.NdArray) -> Optional[RoundingStatistics]:
        """Write what a matrix product reads of an activation or a weight to `target`.

        Returns:
            What rounding did; None when there is nothing to read, and nothing was written.
        """
        readable = _as_float32(source, target)
        if readable is None:
            return None
        return self.kernels.round_to_format(readable, target, self.precision.forward, fitted=True)

    def round_gradient_operand(self, source: nn.NdArray, target: nn.NdArray) -> Optional[RoundingStatistics]:
        """Write what a matrix product reads of an output gradient to `target`, as `round_data_operand`."""
        readable = _as_float32(source, target)
        if readable is None:
            return None
        return self.kernels.round_to_format(
            readable, target, self.precision.backward, fitted=True, random_key=self._random_key()
        )

    def gradient_statistics(self, key: int) -> Optional[ArrayStatistics]:
        """The statistics of a gradient as last rounded, or None."""
        known = self.gradients.get(key)
        return known.statistics if known is not None else None

    def data_statistics(self, key: int) -> Optional[ArrayStatistics]:
        """The statistics of a weight or activation as last rounded, or None."""
        known = self.data.get(key)
        return known.statistics if known is not None else None

    def gradient_rounding(self, key: int) -> Optional[RoundingStatistics]:
        """What rounding a gradient last did, or None."""
        return self.gradients.get(key)

    def data_rounding(self, key: int) -> Optional[RoundingStatistics]:
        """What rounding a weight or activation last did, or None."""
        return self.data.get(key)

    def store_gradient(self, key: int, array: nn.NdArray) -> None:
        """Round a gradient again that was scaled in place, keeping the counts of its first rounding."""
        before = self.gradients.get(key)
        self.round_gradient(key, array)
        if before is not None:
            now = self.gradients[key]
            self.gradients[key] = RoundingStatistics(
                now.statistics, before.underflowed + now.underflowed, before.overflowed + now.overflowed
            )

    def store(self, array: nn.NdArray) -> None:
        """Round the scaled copy of a weight; what only operands are rounded to is for its reader to do."""
        if not self.precision.operands_only:
            self.kernels.round_to_format(array, array, self.precision.data_format(array.size))

    def _random_key(self) -> Optional[int]:
        seed = self.precision.stochastic_seed
        if seed is None:
            return None
        self.draws += 1
        return stream_key(seed, self.draws)


def _as_float32(source: nn.NdArray, copy: nn.NdArray) -> Optional[nn.NdArray]:
    """`source` if it holds float32, else `copy` with its values; None when nothing was written."""
    stored = stored_dtype(source)
    if stored is None:
        return None
    if stored == FLOAT32:
        return source
    copy.data = source.data.astype(FLOAT32)
    return copy
