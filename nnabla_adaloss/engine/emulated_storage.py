# SPDX-License-Identifier: Apache-2.0
"""The engine's view of the storage that holds gradients."""

from __future__ import annotations

from typing import Dict, Optional, Protocol

import nnabla as nn

from ..core.formats import Format
from ..core.layer_precisions import LayerPrecisions
from ..core.precision import Precision
from ..core.random_streams import Draws
from ..core.statistics import ArrayStatistics
from ..kernels import RoundingStatistics
from ..undo.forward_fault import RoundedData


class EmulatedStorage(RoundedData, Protocol):
    """A low-precision storage that knows what it stored. Keys are hashes of variables."""

    weights: Dict[int, nn.NdArray]
    """Rounded copies that stand in for leaves while the graph runs, by key."""

    drawn: Draws
    """How many arrays were rounded at random so far."""

    precisions: LayerPrecisions
    """The formats that are stored."""

    def precision_of(self, key: int) -> Precision:
        """The precision of a variable."""

    def data_format(self, key: int, size: int) -> Format:
        """The format that the data of a variable of `size` elements is stored in."""

    def gradient_format(self, key: int, size: int) -> Format:
        """The format that the gradient of a variable of `size` elements is stored in."""

    def gradient_statistics(self, key: int) -> Optional[ArrayStatistics]:
        """The statistics of the gradient as last stored, or None when it was not seen."""

    def data_statistics(self, key: int) -> Optional[ArrayStatistics]:
        """The statistics of a weight or activation as last stored, or None."""

    def gradient_rounding(self, key: int) -> Optional[RoundingStatistics]:
        """What rounding the gradient last did, or None."""

    def store_gradient(self, key: int, array: nn.NdArray) -> None:
        """Store a gradient again after the engine changed it in place."""

    def store(self, key: int, array: nn.NdArray) -> None:
        """Store the scaled copy of the weight `key`."""
