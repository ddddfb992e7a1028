# SPDX-License-Identifier: Apache-2.0
"""Adaptive loss scaling for NNabla: a loss scale for every layer, computed from what flows through it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, List

from .cuda_libraries import preload_cuda_libraries

if TYPE_CHECKING:
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

# Where public names are looked for; core comes first, since it does without nnabla.
_SUBPACKAGES = (
    "core",
    "errors",
    "scalers",
    "state",
    "emulation",
    "engine",
    "updaters",
    "communicators",
)

# nnabla's GPU extension finds the libraries of NVIDIA's wheels only when they are loaded before it.
preload_cuda_libraries()


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: `nnabla_adaloss.core` and the doctor work without nnabla."""
    if name in __all__:
        for subpackage in _SUBPACKAGES:
            module = importlib.import_module(f".{subpackage}", __name__)
            if hasattr(module, name):
                globals()[name] = getattr(module, name)
                return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> List[str]:
    return sorted({*globals(), *__all__})
