# SPDX-License-Identifier: Apache-2.0
"""The framework's part of ``AdaLoss`` for NNabla arrays."""

from __future__ import annotations

from typing import Any, Union

import nnabla as nn
import numpy as np
from numpy.typing import NDArray

from ..core.ada_loss import AdaLoss
from ..core.config import AdaLossConfig
from ..core.statistics import ArrayStatistics
from ..kernels.interface import Kernels
from .operands import Operand


class NNablaAdaLoss(AdaLoss):
    """Computes the scale of each layer from NNabla arrays.

    Args:
        config: How scales are computed and bounded.
        kernels: The kernels that read the arrays.
    """

    def __init__(self, config: AdaLossConfig, kernels: Kernels) -> None:
        super().__init__(config)
        self.kernels = kernels

    def statistics(self, array: nn.NdArray) -> ArrayStatistics:
        """Return the statistics of ``array`` in one pass."""
        return self.kernels.statistics(array)

    def to_numpy(self, array: Union[nn.NdArray, Operand]) -> NDArray[Any]:
        """Return ``array`` for methods that look at single elements: as a matrix, when it is an operand."""
        return array.matrix() if isinstance(array, Operand) else np.asarray(array.data)
