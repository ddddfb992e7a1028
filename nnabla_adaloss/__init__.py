# SPDX-License-Identifier: Apache-2.0
"""Adaptive loss scaling for NNabla: a loss scale for every layer, computed from what flows through it."""

from __future__ import annotations

from .communicators import MPICommunicator, RankDisagreementError
from .core import (
    AdaLoss,
    AdaLossConfig,
    LayerRecord,
    bound_loss_scale_by_heuristics,
    get_loss_scale,
    get_loss_scale_by_abs_range,
    get_loss_scale_by_approx_range,
    get_loss_scale_by_element_wise_range,
    get_power_of_two_scale,
)
from .cuda_libraries import preload_cuda_libraries
from .emulation import FormatEmulation
from .engine import AdaptiveLossScaling
from .errors import GraphChangedError, LossScaleError, LossScaleWarning
from .scalers import LossScaler
from .state import StateFileError
from .updaters import (
    AdaptiveLossScalingUpdater,
    DynamicLossScalingUpdater,
    FixedLossScalingUpdater,
    UpdateResult,
)

__all__ = [
    "AdaLoss",
    "AdaLossConfig",
    "AdaptiveLossScaling",
    "AdaptiveLossScalingUpdater",
    "DynamicLossScalingUpdater",
    "FixedLossScalingUpdater",
    "FormatEmulation",
    "GraphChangedError",
    "LayerRecord",
    "LossScaleError",
    "LossScaleWarning",
    "LossScaler",
    "MPICommunicator",
    "RankDisagreementError",
    "StateFileError",
    "UpdateResult",
    "bound_loss_scale_by_heuristics",
    "get_loss_scale",
    "get_loss_scale_by_abs_range",
    "get_loss_scale_by_approx_range",
    "get_loss_scale_by_element_wise_range",
    "get_power_of_two_scale",
]

# nnabla's GPU extension finds the libraries of NVIDIA's wheels only when they are loaded before it.
preload_cuda_libraries()
