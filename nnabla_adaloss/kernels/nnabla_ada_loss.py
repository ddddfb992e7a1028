# SPDX-License-Identifier: Apache-2.0
"""The framework's part of `AdaLoss`: NNabla arrays, reduced by kernels."""

from __future__ import annotations

from typing import Any

import nnabla as nn
import numpy as np
from numpy.typing import NDArray

from ..core.config import AdaLossConfig
from ..core.statistics import ArrayStatistics
from ..published import AdaLoss
from .interface import Kernels


class NNablaAdaLoss(AdaLoss):
    """Computes the scale of each layer from NNabla arrays.

    Args:
        config: how scales are computed and bounded.
        kernels: the kernels that read the arrays.

    Example:
        >>> import numpy as np, nnabla as nn
        >>> from nnabla_adaloss.kernels import CpuKernels
        >>> from nnabla_adaloss import AdaLossConfig, NNablaAdaLoss
        >>> g, W = (nn.NdArray.from_numpy_array(np.full((2, 2), v, np.float32)) for v in (1e-7, 0.1))
        >>> NNablaAdaLoss(AdaLossConfig(), CpuKernels()).loss_scale(
        ...     "fc", g, W, fan_in=2, previous_scale=128.0, iteration=0)
        8.0
    """

    def __init__(self, config: AdaLossConfig, kernels: Kernels) -> None:
        super().__init__(config)
        self.kernels = kernels

    def statistics(self, array: nn.NdArray) -> ArrayStatistics:
        """Statistics of `array`, from one pass over it."""
        return self.kernels.statistics(array)

    def to_numpy(self, array: nn.NdArray) -> NDArray[Any]:
        """`array` in host memory."""
        return np.asarray(array.data)
