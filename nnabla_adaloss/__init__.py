# SPDX-License-Identifier: Apache-2.0
"""Adaptive loss scaling for NNabla: a loss scale for every layer, computed from what flows through it.

Everything that a program needs is here. A name is imported when it is first used, so that the parts which do
without nnabla (`nnabla_adaloss.core`, the doctor) work without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Dict, List

from .cuda_libraries import preload_cuda_libraries

if TYPE_CHECKING:  # for type checkers; what runs is `_HOMES`
    from .communicators import CollectiveMismatchError as CollectiveMismatchError
    from .communicators import MPICommunicator as MPICommunicator
    from .communicators import RankDisagreementError as RankDisagreementError
    from .core import AdaLoss as AdaLoss
    from .core import AdaLossConfig as AdaLossConfig
    from .core import AmaxHistory as AmaxHistory
    from .core import ArrayStatistics as ArrayStatistics
    from .core import Format as Format
    from .core import HistoryPolicy as HistoryPolicy
    from .core import LayerRecord as LayerRecord
    from .core import Method as Method
    from .core import Needs as Needs
    from .core import Precision as Precision
    from .core import Range as Range
    from .core import Reason as Reason
    from .core import bound_loss_scale_by_heuristics as bound_loss_scale_by_heuristics
    from .core import get_loss_scale as get_loss_scale
    from .core import get_loss_scale_by_abs_range as get_loss_scale_by_abs_range
    from .core import get_loss_scale_by_approx_range as get_loss_scale_by_approx_range
    from .core import get_loss_scale_by_element_wise_range as get_loss_scale_by_element_wise_range
    from .core import get_power_of_two_scale as get_power_of_two_scale
    from .diagnosis import Diagnosis as Diagnosis
    from .diagnosis import SanityChecker as SanityChecker
    from .diagnosis import Way as Way
    from .diagnosis import diagnose as diagnose
    from .diagnosis import profile as profile
    from .emulation import FormatEmulation as FormatEmulation
    from .emulation import GradientRounding as GradientRounding
    from .engine import AdaptiveLossScaling as AdaptiveLossScaling
    from .errors import GraphChangedError as GraphChangedError
    from .errors import LossScaleError as LossScaleError
    from .errors import LossScaleWarning as LossScaleWarning
    from .functions import ScaleTracker as ScaleTracker
    from .functions import adaptive_loss_scaling as adaptive_loss_scaling
    from .functions import branch as branch
    from .functions import cast_loss_scaling as cast_loss_scaling
    from .functions import loss_scaling as loss_scaling
    from .functions import round_to_format as round_to_format
    from .functions import unscale as unscale
    from .graph import GraphPlan as GraphPlan
    from .graph import LossLike as LossLike
    from .graph import LossWrapper as LossWrapper
    from .kernels import NNablaAdaLoss as NNablaAdaLoss
    from .monitor import BatchRepeated as BatchRepeated
    from .monitor import BatchThrownAway as BatchThrownAway
    from .monitor import LayerRow as LayerRow
    from .monitor import LayerScaled as LayerScaled
    from .monitor import LogMonitor as LogMonitor
    from .monitor import Monitor as Monitor
    from .monitor import NanDump as NanDump
    from .monitor import Overflowed as Overflowed
    from .monitor import Recorder as Recorder
    from .monitor import Recording as Recording
    from .monitor import ScaleChanged as ScaleChanged
    from .monitor import UpdateEnded as UpdateEnded
    from .scalers import GradScaler as GradScaler
    from .scalers import LossScaler as LossScaler
    from .state import StateFileError as StateFileError
    from .updaters import AdaptiveLossScalingUpdater as AdaptiveLossScalingUpdater
    from .updaters import Counters as Counters
    from .updaters import DynamicLossScalingUpdater as DynamicLossScalingUpdater
    from .updaters import FixedLossScalingUpdater as FixedLossScalingUpdater
    from .updaters import UpdateResult as UpdateResult

__version__ = "0.2.0"

# Where each public name lives.
_HOMES: Dict[str, str] = {
    "AdaLoss": "core",
    "AdaLossConfig": "core",
    "AdaptiveLossScaling": "engine",
    "AdaptiveLossScalingUpdater": "updaters",
    "AmaxHistory": "core",
    "ArrayStatistics": "core",
    "BatchRepeated": "monitor",
    "BatchThrownAway": "monitor",
    "CollectiveMismatchError": "communicators",
    "Counters": "updaters",
    "Diagnosis": "diagnosis",
    "DynamicLossScalingUpdater": "updaters",
    "FixedLossScalingUpdater": "updaters",
    "Format": "core",
    "FormatEmulation": "emulation",
    "GradScaler": "scalers",
    "GradientRounding": "emulation",
    "GraphChangedError": "errors",
    "GraphPlan": "graph",
    "HistoryPolicy": "core",
    "LayerRecord": "core",
    "LayerRow": "monitor",
    "LayerScaled": "monitor",
    "LogMonitor": "monitor",
    "LossLike": "graph",
    "LossScaleError": "errors",
    "LossScaleWarning": "errors",
    "LossScaler": "scalers",
    "LossWrapper": "graph",
    "MPICommunicator": "communicators",
    "Method": "core",
    "Monitor": "monitor",
    "NNablaAdaLoss": "kernels",
    "NanDump": "monitor",
    "Needs": "core",
    "Overflowed": "monitor",
    "Precision": "core",
    "Range": "core",
    "RankDisagreementError": "communicators",
    "Reason": "core",
    "Recorder": "monitor",
    "Recording": "monitor",
    "SanityChecker": "diagnosis",
    "ScaleChanged": "monitor",
    "ScaleTracker": "functions",
    "StateFileError": "state",
    "UpdateEnded": "monitor",
    "UpdateResult": "updaters",
    "Way": "diagnosis",
    "adaptive_loss_scaling": "functions",
    "bound_loss_scale_by_heuristics": "core",
    "branch": "functions",
    "cast_loss_scaling": "functions",
    "diagnose": "diagnosis",
    "get_loss_scale": "core",
    "get_loss_scale_by_abs_range": "core",
    "get_loss_scale_by_approx_range": "core",
    "get_loss_scale_by_element_wise_range": "core",
    "get_power_of_two_scale": "core",
    "loss_scaling": "functions",
    "profile": "diagnosis",
    "round_to_format": "functions",
    "unscale": "functions",
}

__all__ = ["__version__", *_HOMES]

# nnabla's GPU extension finds the libraries of NVIDIA's wheels only when they are loaded before it.
preload_cuda_libraries()


def __getattr__(name: str) -> Any:
    """A public name, imported from its home at its first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    return found


def __dir__() -> List[str]:
    return sorted({*globals(), *_HOMES})
