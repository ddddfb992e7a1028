# SPDX-License-Identifier: Apache-2.0
"""Adaptive loss scaling for NNabla: a loss scale for every layer, computed from what flows through it."""

from __future__ import annotations

from .core import (
    AdaLoss,
    AdaLossConfig,
    bound_loss_scale_by_heuristics,
    get_loss_scale,
    get_loss_scale_by_abs_range,
    get_loss_scale_by_approx_range,
    get_loss_scale_by_element_wise_range,
    get_power_of_two_scale,
)
from .emulation import FormatEmulation
from .engine import AdaptiveLossScaling
from .errors import LossScaleError, LossScaleWarning
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
    "LossScaleError",
    "LossScaleWarning",
    "UpdateResult",
    "bound_loss_scale_by_heuristics",
    "get_loss_scale",
    "get_loss_scale_by_abs_range",
    "get_loss_scale_by_approx_range",
    "get_loss_scale_by_element_wise_range",
    "get_power_of_two_scale",
]
