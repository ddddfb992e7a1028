# SPDX-License-Identifier: Apache-2.0
"""A storage that rounds what is written to it, and knows what it flushed to zero or to infinity."""

from __future__ import annotations

from typing import Dict, Optional

import nnabla as nn

from ..core.precision import Precision
from ..core.statistics import ArrayStatistics
from ..kernels.arrays import FLOAT32, stored_dtype
from ..kernels.interface import Kernels, RoundingStatistics


class RoundedStorage:
    """Rounds arrays to a format in place and keeps the last statistics of each, by variable key.

    Args:
        precision: the formats that are emulated.
        kernels: the kernels that round.
    """

    def __init__(self, precision: Precision, kernels: Kernels) -> None:
        self.precision = precision
        self.kernels = kernels
        self.gradients: Dict[int, RoundingStatistics] = {}
        self.data: Dict[int, RoundingStatistics] = {}

    def round_gradient(self, key: int, array: nn.NdArray) -> None:
        """Round the gradient of the variable `key`; unwritten and non-float32 arrays stay as they are."""
        if stored_dtype(array) == FLOAT32:
            self.gradients[key] = self.kernels.round_to_format(array, array, self.precision.backward)

    def round_data(self, key: int, source: nn.NdArray, target: nn.NdArray) -> nn.NdArray:
        """Round the data of the variable `key` into `target`, which may be `source`.

        Returns:
            Where the stored data is: `target`, or `source` when there is nothing to round.
        """
        stored = stored_dtype(source)
        if stored is None:
            return source
        if stored != FLOAT32:
            target.data = source.data.astype(FLOAT32)
            source = target
        self.data[key] = self.kernels.round_to_format(source, target, self.precision.forward)
        return target

    def gradient_statistics(self, key: int) -> Optional[ArrayStatistics]:
        """The statistics of a gradient as last rounded, or None."""
        known = self.gradients.get(key)
        return known.statistics if known is not None else None

    def data_statistics(self, key: int) -> Optional[ArrayStatistics]:
        """The statistics of a weight or activation as last rounded, or None."""
        known = self.data.get(key)
        return known.statistics if known is not None else None

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
        """Round the scaled copy of a weight."""
        self.kernels.round_to_format(array, array, self.precision.forward)
